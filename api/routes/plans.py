"""/v1/plans: does it fit, what peaks, which launch parameters, how fast."""

from __future__ import annotations

import threading
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Query, Request, Response

from api.auth import reads, writes
from api.errors import Failure
from api.etags import Conditional, stored
from api.routes.context import TAGGED, Config, Cursor, Limit, Store, get_resource, problems
from api.schemas.common import Page
from api.schemas.plans import Plan, PlanRequest, PlanSummary
from api.services import planning as service
from db.repositories import IdempotencyRepository

router = APIRouter(prefix="/v1/plans", tags=["plans"])
_SCOPE = "plans"


@router.post(
    "",
    status_code=201,
    dependencies=[Depends(writes)],
    response_model=Plan,
    responses={
        **problems(404, 413, 415),
        201: {"description": "The plan, stored; Location is its address", **TAGGED},
    },
)
def make_plan(
    *,
    request: Request,
    settings: Config,
    store: Store,
    body: PlanRequest,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=200)] = None,
) -> Response:
    """Plan a run. The same Idempotency-Key and body give the same plan again."""
    asked = body.model_dump()
    with store.reading() as session:
        known = (
            IdempotencyRepository(session).find(_SCOPE, idempotency_key, asked) if idempotency_key else None
        )
        if known is not None:
            return _created(service.get_plan(session, known))
        inputs = service.inputs_of(session, body)
    # Planning takes seconds of one core: it stays outside any transaction.
    places: threading.BoundedSemaphore = request.app.state.planning
    if not places.acquire(blocking=False):
        raise Failure(
            rule=f"at most {settings.max_planning} plans are computed or waited for at once",
            value=settings.max_planning,
            remedy="Send the request again in a few seconds.",
        )
    try:
        plan = service.compute_plan(inputs)
    finally:
        places.release()
    with store.session() as session:
        if idempotency_key:
            earlier = IdempotencyRepository(session).find(_SCOPE, idempotency_key, asked)
            if earlier is not None:
                return _created(service.get_plan(session, earlier))
        saved = service.save_plan(session, plan)
        if idempotency_key:
            kept = IdempotencyRepository(session).remember(_SCOPE, idempotency_key, asked, saved["id"])
            if kept != saved["id"]:  # the same request was a moment faster
                session.rollback()
                saved = service.get_plan(session, kept)
    return _created(saved)


def _created(plan: dict[str, Any]) -> Response:
    return stored(plan, status=201, headers={"Location": f"/v1/plans/{plan['id']}"})


@router.get("", dependencies=[Depends(reads)], responses=problems())
def list_plans(store: Store, cursor: Cursor = None, limit: Limit = 50) -> Page[PlanSummary]:
    """Plans, newest first."""
    with store.reading() as session:
        return service.list_plans(session, cursor=cursor, limit=limit)


@get_resource(router, "/{plan_id}", Plan)
def get_plan(store: Store, plan_id: str, conditions: Conditional) -> Response:
    """A plan as it was answered; it never changes."""
    with store.reading() as session:
        return conditions.answer(service.get_plan(session, plan_id))


@get_resource(router, "/{plan_id}/export", dict[str, Any])
def export_plan(
    store: Store,
    plan_id: str,
    conditions: Conditional,
    form: Annotated[
        Literal["launch"], Query(alias="format", description="launch: launch.json for operators.launch")
    ] = "launch",
) -> Response:
    """The plan's launch parameters as a file a training job reads."""
    with store.reading() as session:
        exported = service.export_plan(service.get_plan(session, plan_id))
    return conditions.answer(exported, {"Content-Disposition": f'attachment; filename="{form}.json"'})
