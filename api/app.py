"""The HTTP application: /v1, the pages, health and metrics. It stores sweeps; a worker executes them."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from api.etags import Conditional
from api.middleware import BodyLimit, RequestMetrics, SecurityHeaders, StorableAddress
from api.problems import LastResort, install_problems
from api.routes import catalog, health, plans, sweeps, trials
from api.services.store import open_database
from api.settings import Settings
from api.web import pages, sign_in

STATIC = Path(__file__).parent / "web" / "static"


def package_version() -> str:
    """Version of the installed package."""
    try:
        return version("flatpeak")
    except PackageNotFoundError:
        return "0.0.0"


class _Counted:
    """Middleware around everything: counts and times requests."""

    def __init__(self, app: Any, metrics: RequestMetrics) -> None:
        self._app = metrics.wrap(app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def create_app(settings: Settings | None = None) -> FastAPI:
    """The application of one process.

    Raises:
        UnreachableDatabase: the database does not answer.
        RuleError: its URL is not readable.
    """
    chosen = settings or Settings()
    database = open_database(chosen.database_url)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        app.state.database.close()

    app = FastAPI(
        title="flatpeak",
        version=package_version(),
        summary="Auto-tuner and cost-model service for long-context Mixture-of-Experts training",
        description="Times are RFC 3339, sizes bytes, durations seconds. Errors are RFC 9457 problems "
        "that say which rule, which value and what to do.",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.settings = chosen
    app.state.database = database
    app.state.registry = CollectorRegistry()
    app.state.streams = set()
    app.state.endpoints = []
    app.state.planning = threading.BoundedSemaphore(chosen.max_planning)
    install_problems(app)
    public = (plans.router, sweeps.router, trials.router, catalog.router, health.router)
    for router in (*public, sign_in.router, pages.router):
        app.include_router(router, include_in_schema=router in public)
        app.state.endpoints += [route for route in router.routes if isinstance(route, APIRoute)]
    pages.install(app)

    def document(conditions: Conditional) -> Response:
        return conditions.answer(openapi(app))

    app.add_api_route("/v1/openapi.json", document, methods=["GET", "HEAD"], include_in_schema=False)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.add_middleware(LastResort)
    app.add_middleware(BodyLimit, max_bytes=chosen.max_body_bytes)
    app.add_middleware(StorableAddress)
    app.add_middleware(SecurityHeaders)
    app.add_middleware(_Counted, metrics=RequestMetrics(app.state.registry))
    return app


def openapi(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document; what ``docs/openapi.json`` holds."""
    return app.openapi()
