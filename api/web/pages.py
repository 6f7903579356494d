"""The pages. Tables are rendered here; charts read the public /v1 addresses."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.responses import RedirectResponse

from api.auth import SignInNeeded, page_reads
from api.errors import BadRequest, NotFound
from api.plan_text import fitting_lines, ranked_launches
from api.routes.context import Cursor, Store
from api.routes.sweeps import Knobs
from api.schemas.sweeps import Trial
from api.services import catalog, planning, tables
from api.services import sweeps as sweep_service
from api.services.specs import example_names
from api.web.templates import render
from cost_model.presets import PRESET_NAMES
from db.lifecycle import SweepState, TrialState

router = APIRouter(dependencies=[Depends(page_reads)])
OPERATORS = ("pipelined_llep", "ring_dtp", "checkpoint_offload", "stream_adamw")
SHOWN_TRIALS = 200
_PASSES_FROM = 200
_COMPARED = 100
_FORM = {
    "context_tokens": "131072",
    "global_batch_tokens": "524288",
    "nodes": "1",
    "imbalance": "1.3",
    "migrated_experts": "0",
    "mode": "expected",
    "model": "",
    "cluster": "preset:hgx-h200",
}


def install(app: FastAPI) -> None:
    """Send browsers without a token to the login form."""

    def to_login(request: Request, error: Exception) -> Response:
        assert isinstance(error, SignInNeeded)
        if "hx-request" in request.headers:
            return Response(status_code=401, headers={"HX-Redirect": error.location})
        return RedirectResponse(error.location, status_code=303)

    app.add_exception_handler(SignInNeeded, to_login)


def _missing(request: Request, error: NotFound | BadRequest) -> Response:
    title = "Not found" if isinstance(error, NotFound) else "Not a page of this list"
    remedy = error.on_page if isinstance(error, NotFound) else error.remedy
    context = {"title": title, "rule": error.rule, "value": error.value, "remedy": remedy}
    return render(request, "problem.html", context, status=error.status)


@router.get("/")
def sweeps_page(
    request: Request,
    store: Store,
    operator: Annotated[str, Query(max_length=64)] = "",
    state: Annotated[str, Query(max_length=16)] = "",
    cursor: Cursor = None,
) -> Response:
    """All sweeps, newest first."""
    try:
        with store.reading() as session:
            page = sweep_service.list_sweeps(
                session, cursor=cursor, limit=50, operator=operator or None, state=state or None
            )
    except BadRequest as error:
        return _missing(request, error)
    chosen = {key: value for key, value in (("operator", operator), ("state", state)) if value}
    context = {
        "section": "sweeps",
        "page": page.model_dump(),
        "operator": operator,
        "state": state,
        "operators": OPERATORS,
        "states": [item.value for item in SweepState],
        "self_address": "/?" + urlencode({**chosen, **({"cursor": cursor} if cursor else {})}),
        "next_address": "/?" + urlencode({**chosen, "cursor": page.next_cursor or ""}),
    }
    return render(request, "sweeps.html", context)


@router.get("/sweeps/{sweep_id}")
def sweep_page(
    *,
    request: Request,
    store: Store,
    sweep_id: str,
    knobs: Knobs,
    state: Annotated[list[str] | None, Query()] = None,
    pass_: Annotated[str, Query(alias="pass", max_length=32)] = "",
    compare: Annotated[str, Query(max_length=40)] = "",
) -> Response:
    """One sweep, live."""
    states = {item for item in state or [] if item in {known.value for known in TrialState}}
    try:
        with store.reading() as session:
            sweep = sweep_service.get_sweep(session, sweep_id)
            everything = sweep_service.list_trials(
                session, sweep_id, cursor=None, limit=10_000, states=set(), knobs={}
            ).items
            first, _ = tables.samples_after(session, sweep_id, 0, _PASSES_FROM)
            like = sweep_service.list_sweeps(
                session, cursor=None, limit=_COMPARED, operator=sweep.operator, state=None
            ).items
    except NotFound as error:
        return _missing(request, error)
    trials = [trial for trial in everything if _kept(trial, states, knobs)]
    columns = list(dict.fromkeys(name for trial in everything for name in trial.config))
    query = urlencode(
        [("state", item) for item in sorted(states)]
        + [(f"knob.{name}", value) for name, value in sorted(knobs.items())]
        + [(name, text) for name, text in (("pass", pass_), ("compare", compare)) if text]
    )
    context = {
        "section": "sweeps",
        "sweep": sweep.model_dump(),
        "trials": [trial.model_dump() for trial in trials[:SHOWN_TRIALS]],
        "more": len(trials) > SHOWN_TRIALS,
        "columns": columns,
        "knobs": _knob_values(everything, columns),
        "passes": sorted({sample.pass_ for _, sample in first}),
        "trial_states": [item.value for item in TrialState if item is not TrialState.LOST],
        "others": [one.model_dump() for one in like if one.id != sweep_id],
        "chosen": {"states": states, "knobs": knobs, "pass_": pass_, "compare": compare},
        "query": f"?{query}" if query else "",
    }
    return render(request, "sweep.html", context)


def _kept(trial: Trial, states: set[str], knobs: dict[str, str]) -> bool:
    if states and trial.state not in states:
        return False
    return all(sweep_service.knob_text(trial.config.get(name)) == value for name, value in knobs.items())


def _knob_values(trials: list[Trial], columns: list[str]) -> dict[str, list[str]]:
    values: dict[str, list[str]] = {}
    for name in columns:
        seen = {sweep_service.knob_text(trial.config[name]) for trial in trials if name in trial.config}
        if len(seen) > 1:
            values[name] = sorted(seen, key=_natural)
    return values


def _natural(text: str) -> tuple[int, float, str]:
    try:
        return (0, float(text), "")
    except ValueError:
        return (1, 0.0, text)


@router.get("/trials/{trial_id}")
def trial_page(request: Request, store: Store, trial_id: str) -> Response:
    """One trial."""
    try:
        with store.reading() as session:
            trial = sweep_service.get_trial(session, trial_id)
            sweep = sweep_service.get_sweep(session, trial.sweep_id)
    except NotFound as error:
        return _missing(request, error)
    context = {"section": "sweeps", "trial": trial.model_dump(), "sweep": sweep.model_dump()}
    return render(request, "trial.html", context)


@router.get("/plan")
def plan_form(request: Request, store: Store) -> Response:
    """The form; its fields can be given in the query string."""
    given = {key: value for key, value in request.query_params.items() if key in _FORM}
    with store.reading() as session:
        models = catalog.list_models(session, cursor=None, limit=200)
        clusters = catalog.list_clusters(session, cursor=None, limit=200)
    context: dict[str, Any] = {
        "section": "plan",
        "chosen": {**_FORM, **given},
        "models": [item.model_dump() for item in models.items],
        "examples": example_names(),
        "clusters": [item.model_dump() for item in clusters.items],
        "presets": PRESET_NAMES,
    }
    return render(request, "plan.html", context)


@router.get("/plans")
def plans_page(request: Request, store: Store, cursor: Cursor = None) -> Response:
    """All plans, newest first."""
    try:
        with store.reading() as session:
            page = planning.list_plans(session, cursor=cursor, limit=50)
    except BadRequest as error:
        return _missing(request, error)
    return render(request, "plans.html", {"section": "plans", "page": page.model_dump()})


@router.get("/plans/{plan_id}")
def plan_page(request: Request, store: Store, plan_id: str) -> Response:
    """One plan."""
    try:
        with store.reading() as session:
            plan = planning.get_plan(session, plan_id)
    except NotFound as error:
        return _missing(request, error)
    context = {
        "section": "plans",
        "plan": {"what_would_fit": None, "warnings": [], **plan},
        "fitting": fitting_lines(plan.get("what_would_fit") or {}),
        "ranked": ranked_launches(plan),
    }
    return render(request, "plan_result.html", context)


@router.get("/cost-models")
def cost_models_page(
    request: Request,
    store: Store,
    chosen_id: Annotated[str, Query(alias="id", max_length=40)] = "",
    cursor: Cursor = None,
) -> Response:
    """Cost models, and the chosen one (the newest promoted one without a choice)."""
    try:
        with store.reading() as session:
            page = catalog.list_cost_models(session, cursor=cursor, limit=50, hardware_id=None)
            chosen = chosen_id or next((item.id for item in page.items if item.promoted), "")
            detail = catalog.get_cost_model(session, chosen).model_dump() if chosen else None
    except (NotFound, BadRequest) as error:
        return _missing(request, error)
    context = {"section": "cost_models", "page": page.model_dump(), "detail": detail}
    return render(request, "cost_models.html", context)
