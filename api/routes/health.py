"""/healthz (the process answers), /readyz (what it can do now), /metrics."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

from api.auth import reads
from api.problems import Problem
from api.routes.context import Store, problems
from api.schemas.catalog import Health, Readiness
from api.services import readiness as service

router = APIRouter(tags=["operation"])


@router.get("/healthz")
def health() -> Health:
    """The process answers; says nothing about the database."""
    return Health(status="ok")


@router.get(
    "/readyz",
    dependencies=[Depends(reads)],
    response_model=Readiness,
    responses={401: {"model": Problem}, 503: {"model": Readiness, "description": "Not ready, and why"}},
)
def ready(store: Store) -> JSONResponse:
    """Whether plans and sweeps can be served now, and from what: database, presets, cost models."""
    state = service.readiness(store)
    return JSONResponse(state.model_dump(), status_code=200 if state.ready else 503)


@router.get(
    "/metrics",
    dependencies=[Depends(reads)],
    response_class=Response,
    responses={**problems(), 200: {"content": {"text/plain": {}}, "description": "Prometheus text format"}},
)
def metrics(request: Request, store: Store) -> Response:
    """Requests of this process, and sweeps and trials by state."""
    registry: CollectorRegistry = request.app.state.registry
    counted = CollectorRegistry()
    sweeps = Gauge("flatpeak_sweeps", "Sweeps by state", ["state"], registry=counted)
    trials = Gauge("flatpeak_trials", "Trials of active sweeps by state", ["state"], registry=counted)
    with store.reading() as session:
        for state, number in service.sweep_counts(session).items():
            sweeps.labels(state).set(number)
        for state, number in service.trial_counts(session).items():
            trials.labels(state).set(number)
    return Response(generate_latest(registry) + generate_latest(counted), media_type=CONTENT_TYPE_LATEST)
