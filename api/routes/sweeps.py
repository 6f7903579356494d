"""/v1/sweeps: what is measured. The server stores and shows sweeps; a worker process runs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from api.auth import reads, writes
from api.etags import Conditional, stored
from api.routes.context import TAGGED, Config, Cursor, Limit, Store, get_resource, problems
from api.routes.events import event_stream
from api.schemas.attempts import AttemptSpan
from api.schemas.common import Page, decode_number, encode_cursor
from api.schemas.sweeps import Sample, Sweep, SweepRequest, Trial
from api.services import sweeps as service
from api.services import tables
from db.lifecycle import SweepState, TrialState
from tuner.sweeping.sweep import create_sweep

router = APIRouter(prefix="/v1/sweeps", tags=["sweeps"])
SAMPLE_PAGE = 5000
_KNOB = "knob."


def knob_filters(request: Request) -> dict[str, str]:
    """``?knob.NAME=VALUE`` of a request, NAME to VALUE; empty ones are left out."""
    items = request.query_params.multi_items()
    return {name[len(_KNOB) :]: value for name, value in items if name.startswith(_KNOB) and value}


Knobs = Annotated[dict[str, str], Depends(knob_filters)]
States = Annotated[list[TrialState] | None, Query(description="Keep trials in these states")]


@router.get("", dependencies=[Depends(reads)], responses=problems())
def list_sweeps(
    store: Store,
    cursor: Cursor = None,
    limit: Limit = 50,
    operator: Annotated[str | None, Query(max_length=64)] = None,
    state: SweepState | None = None,
) -> Page[Sweep]:
    """Sweeps, newest first."""
    with store.reading() as session:
        return service.list_sweeps(session, cursor=cursor, limit=limit, operator=operator, state=state)


@router.post(
    "",
    status_code=202,
    dependencies=[Depends(writes)],
    response_model=Sweep,
    responses={**problems(413, 415), 202: {"description": "Queued; Location is its address", **TAGGED}},
)
def start_sweep(
    store: Store,
    body: SweepRequest,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=200)] = None,
) -> Response:
    """Queue a sweep. The same Idempotency-Key and body give the same sweep again."""
    sweep_id = create_sweep(store, body, idempotency_key)
    with store.reading() as session:
        sweep = service.get_sweep(session, sweep_id)
    return stored(sweep, status=202, headers={"Location": f"/v1/sweeps/{sweep_id}"})


@get_resource(router, "/{sweep_id}", Sweep)
def get_sweep(store: Store, sweep_id: str, conditions: Conditional) -> Response:
    """One sweep and how far it is."""
    with store.reading() as session:
        return conditions.answer(service.get_sweep(session, sweep_id))


@router.post(
    "/{sweep_id}/cancel",
    dependencies=[Depends(writes)],
    response_model=Sweep,
    responses={**problems(404, 409, 412), 200: {"description": "The sweep, cancelled", **TAGGED}},
)
def cancel_sweep(store: Store, sweep_id: str, conditions: Conditional) -> Response:
    """Cancel a sweep: queued trials at once, running ones as soon as their worker hears of it.

    If-Match holds the tag of the sweep, which changes with its trials.
    """
    with store.session() as session:
        sweep = service.cancel_sweep(session, sweep_id, conditions.allow_change)
    return stored(sweep, status=200, headers={"Content-Location": f"/v1/sweeps/{sweep_id}"})


@router.get("/{sweep_id}/trials", dependencies=[Depends(reads)], responses=problems(404))
def list_trials(
    *,
    store: Store,
    sweep_id: str,
    knobs: Knobs,
    state: States = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Page[Trial]:
    """Trials by number; filter with ?state= (repeatable) and ?knob.NAME=VALUE."""
    states = {item.value for item in state or []}
    with store.reading() as session:
        return service.list_trials(session, sweep_id, cursor=cursor, limit=limit, states=states, knobs=knobs)


@router.get(
    "/{sweep_id}/trials.csv",
    dependencies=[Depends(reads)],
    response_class=StreamingResponse,
    responses={**problems(404), 200: {"content": {"text/csv": {}}, "description": "One row a trial"}},
)
def trials_csv(store: Store, sweep_id: str, knobs: Knobs, state: States = None) -> StreamingResponse:
    """The trials as CSV, one column a knob, with the same filters."""
    pieces = tables.trials_csv(store, sweep_id, {item.value for item in state or []}, knobs)
    return csv_response(pieces, f"{sweep_id}-trials.csv")


@router.get("/{sweep_id}/samples", dependencies=[Depends(reads)], responses=problems(404))
def list_samples(
    store: Store,
    sweep_id: str,
    cursor: Cursor = None,
    limit: Annotated[int, Query(ge=1, le=SAMPLE_PAGE)] = 1000,
) -> Page[Sample]:
    """Raw samples of the successful trials: one per rank, pass and repeat."""
    after = decode_number(cursor) or 0
    with store.reading() as session:
        service.get_sweep(session, sweep_id)
        rows, more = tables.samples_after(session, sweep_id, after, limit)
    return Page(items=[item for _, item in rows], next_cursor=encode_cursor(rows[-1][0]) if more else None)


@router.get("/{sweep_id}/attempts", dependencies=[Depends(reads)], responses=problems(404))
def list_attempts(
    store: Store, sweep_id: str, cursor: Cursor = None, limit: Limit = 100
) -> Page[AttemptSpan]:
    """Who worked on which trial and when, in the order of the claims."""
    with store.reading() as session:
        return tables.attempts_page(session, sweep_id, cursor=cursor, limit=limit)


@router.get(
    "/{sweep_id}/samples.csv",
    dependencies=[Depends(reads)],
    response_class=StreamingResponse,
    responses={**problems(404), 200: {"content": {"text/csv": {}}, "description": "One row a sample"}},
)
def samples_csv(store: Store, sweep_id: str) -> StreamingResponse:
    """All samples of the successful trials as CSV, sent as they are read."""
    return csv_response(tables.samples_csv(store, sweep_id), f"{sweep_id}-samples.csv")


@router.get(
    "/{sweep_id}/events",
    dependencies=[Depends(reads)],
    response_class=StreamingResponse,
    responses={
        **problems(404),
        200: {"content": {"text/event-stream": {}}, "description": "Server-sent events"},
    },
)
def sweep_events(
    request: Request,
    store: Store,
    settings: Config,
    sweep_id: str,
    last_event_id: Annotated[str | None, Header(max_length=20)] = None,
) -> StreamingResponse:
    """What happens to the sweep, as it happens. Last-Event-ID continues where a stream broke off."""
    with store.reading() as session:
        service.get_sweep(session, sweep_id)
    return event_stream(request, store, settings, sweep_id, last_event_id)


def csv_response(pieces: Iterator[str], name: str) -> StreamingResponse:
    """A CSV download, sent piece by piece."""
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(pieces, media_type="text/csv", headers=headers)
