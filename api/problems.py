"""Errors over HTTP: RFC 9457 problem details that say which rule, which value and what to do."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from sqlalchemy.exc import InterfaceError, OperationalError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import broken_rule, is_database_fault, plain
from cost_model.field_rules import rule_of

MEDIA_TYPE = "application/problem+json"
_LOG = logging.getLogger("flatpeak.api")
_HTTP_RULES = {
    400: (
        "the body must be JSON that can be read",
        "Send one JSON object in UTF-8, without numbers of thousands of digits and not nested hundreds deep.",
    ),
    404: ("the address must name something this service has", "See /v1/openapi.json for the addresses."),
    405: ("the address must be called with a method it has", "The Allow header lists the methods."),
    413: ("the body must be below the size limit", "Send less in one request."),
    415: ("the body must be application/json", "Send Content-Type: application/json."),
}


class BrokenField(BaseModel):
    """One value inside a request that broke a rule."""

    pointer: str = Field(
        description="JSON pointer (RFC 6901) of the value in the body, or the parameter's name"
    )
    rule: str
    value: Any = None


class Problem(BaseModel):
    """An RFC 9457 problem: the rule that was broken, the value that broke it and what to do about it."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    rule: str
    value: Any = None
    remedy: str
    errors: list[BrokenField] | None = None


def problem_response(
    request: Request,
    status: int,
    *,
    rule: str,
    value: object,
    remedy: str,
    errors: list[dict[str, Any]] | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """The JSON response of one problem; 401 says how to authenticate."""
    title = HTTPStatus(status).phrase
    body: dict[str, Any] = {
        "type": f"urn:flatpeak:problem:{title.lower().replace(' ', '-')}",
        "title": title,
        "status": status,
        "detail": f"{rule} (got {plain(value)!r}). {remedy}",
        "instance": request.url.path,
        "rule": rule,
        "value": plain(value),
        "remedy": remedy,
    }
    if errors:
        body["errors"] = errors
    extra = dict(headers or {})
    if status == 401:
        extra["WWW-Authenticate"] = 'Bearer realm="flatpeak"'
    return JSONResponse(body, status_code=status, headers=extra, media_type=MEDIA_TYPE)


def install_problems(app: FastAPI) -> None:
    """Make ``app`` answer every error as a problem."""
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ValueError, _rule)
    app.add_exception_handler(OperationalError, _database)
    app.add_exception_handler(InterfaceError, _database)


def _rule(request: Request, error: Exception) -> JSONResponse:
    broken = broken_rule(error)
    if broken is None:
        return _unexpected(request, error)
    rule, value, remedy = broken
    status = 503 if is_database_fault(error) else int(getattr(error, "status", 422))
    return problem_response(request, status, rule=rule, value=value, remedy=remedy)


def _validation(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    items = error.errors()
    if items and items[0]["type"] == "json_invalid":
        position = items[0]["loc"][-1]
        reason = items[0].get("ctx", {}).get("error", "not JSON")
        return problem_response(
            request,
            400,
            rule="the body must be one JSON object",
            value=f"{reason} at character {position}",
            remedy="Mend the JSON at that place.",
        )
    fields = [
        {"pointer": _pointer(item["loc"]), "rule": rule_of(item), "value": plain(item.get("input"))}
        for item in items[:20]
    ]
    first = (
        fields[0] if fields else {"pointer": "", "rule": "the request must match the schema", "value": None}
    )
    return problem_response(
        request,
        422,
        rule=f"{first['pointer']}: {first['rule']}",
        value=first["value"],
        remedy="Mend the values listed under errors; /v1/openapi.json has the schema.",
        errors=fields,
    )


def _pointer(location: tuple[Any, ...]) -> str:
    where, *path = location or ("body",)
    if where != "body":
        return f"{where} parameter {'.'.join(str(part) for part in path)}"
    return "/" + "/".join(str(part).replace("~", "~0").replace("/", "~1") for part in path)


def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    rule, remedy = _HTTP_RULES.get(error.status_code, (str(error.detail), "See /v1/openapi.json."))
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = ", ".join(_methods(request)) or headers.get("Allow", "")
    return problem_response(
        request,
        error.status_code,
        rule=rule,
        value=f"{request.method} {request.url.path}",
        remedy=remedy,
        headers=headers,
    )


def _methods(request: Request) -> list[str]:
    """Methods of the address, over all routes that have it: the framework knows of the first one only."""
    routes = [route for route in request.app.state.endpoints if route.path_regex.match(request.url.path)]
    return sorted({method for route in routes for method in route.methods or ()})


def _database(request: Request, error: Exception) -> JSONResponse:
    _LOG.error("database error on %s %s: %s", request.method, request.url.path, type(error).__name__)
    return problem_response(
        request,
        503,
        rule="the database must answer and have the current schema",
        value=type(error).__name__,
        remedy="Check that it runs, then `flatpeak db check` and `flatpeak db migrate`.",
    )


class LastResort:
    """Answers what no handler foresaw: a 500 problem, and the traceback in the log."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception as error:
            if scope["type"] != "http" or started:
                raise
            await _unexpected(Request(scope), error)(scope, receive, send)


def _unexpected(request: Request, error: Exception) -> JSONResponse:
    _LOG.exception("unexpected error on %s %s", request.method, request.url.path, exc_info=error)
    return problem_response(
        request,
        500,
        rule="a well-formed request must be answered",
        value=type(error).__name__,
        remedy="This is a fault of flatpeak: the server's log has the traceback.",
    )
