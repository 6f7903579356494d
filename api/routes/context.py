"""What routes take from the application: the database, the settings, shared parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response

from api.auth import reads
from api.problems import Problem
from api.schemas.common import MAX_PAGE
from api.settings import Settings
from db.session import Database


def _database(request: Request) -> Database:
    database: Database = request.app.state.database
    return database


def _settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


Store = Annotated[Database, Depends(_database)]
Config = Annotated[Settings, Depends(_settings)]
Cursor = Annotated[str | None, Query(max_length=200, description="next_cursor of the page before")]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="Most items on the page")]

_CONTENT = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
_WHAT = {
    400: "The request is not readable",
    401: "No valid token",
    403: "The token lacks the scope",
    404: "Nothing is stored under that id",
    409: "The thing is in another state",
    412: "The resource is not as If-Match or If-None-Match asks",
    413: "The body is too large",
    415: "The body is not JSON",
    422: "A value breaks a rule",
    428: "If-Match must say which version is replaced",
    503: "The database does not answer",
}
_ALWAYS = (400, 401, 403, 422, 503)


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses: problems any route may answer, and the given ones."""
    return {
        status: {"description": _WHAT[status], "model": Problem, "content": _CONTENT}
        for status in sorted({*_ALWAYS, *statuses})
    }


TAGGED: dict[str, Any] = {
    "headers": {"ETag": {"description": "Strong tag of the representation", "schema": {"type": "string"}}}
}
"""OpenAPI part of a response that carries a tag."""


def get_resource(
    router: APIRouter, path: str, model: Any
) -> Callable[[Callable[..., Response]], Callable[..., Response]]:
    """Decorator: ``path`` answers GET and HEAD with one resource and its tag, or 304, as the endpoint makes it."""

    def register(endpoint: Callable[..., Response]) -> Callable[..., Response]:
        needed = [Depends(reads)]
        router.add_api_route(
            path,
            endpoint,
            methods=["GET"],
            response_model=model,
            dependencies=needed,
            responses={
                **problems(404, 412),
                200: {"description": "The resource as it is now", **TAGGED},
                304: {"description": "The client has this representation", **TAGGED},
            },
        )
        router.add_api_route(
            path,
            endpoint,
            methods=["HEAD"],
            response_model=None,
            dependencies=needed,
            include_in_schema=False,
        )
        return endpoint

    return register
