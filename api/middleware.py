"""What holds for every request: address, body size, media type, security headers, counting."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable

from fastapi import Request
from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import TooLarge
from api.problems import problem_response

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_METHODS_WITH_BODY = {"POST", "PUT", "PATCH"}
_MEDIA_TYPES = {"application/json"}
_FORM = "application/x-www-form-urlencoded"
MAX_NESTING = 64
"""Far above any body; all that reads one may go down it level by level."""
_TEXT_OR_BRACKET = re.compile(rb'"(?:[^"\\]+|\\.)*"?|[\[{]|[\]}]', re.DOTALL)


class SecurityHeaders:
    """Adds the content security policy and its relatives to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                # Scripts import each other without a version: a browser asks each time, and mostly hears 304.
                static = scope["path"].startswith("/static/")
                headers.setdefault("Cache-Control", "no-cache" if static else "no-store")
            await send(message)

        await self.app(scope, receive, with_headers if scope["type"] == "http" else send)


class StorableAddress:
    """Refuses addresses that hold a NUL (400): not every database takes one, not even to look for it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or ("\0" not in scope["path"] and b"%00" not in scope["query_string"]):
            await self.app(scope, receive, send)
            return
        refusal = problem_response(
            Request(scope),
            400,
            rule="an address must not hold a NUL character",
            value=scope["path"] if "\0" in scope["path"] else scope["query_string"].decode("latin-1"),
            remedy="Take %00 out of it.",
        )
        await refusal(scope, receive, send)


class BodyLimit:
    """Refuses bodies before a route reads them: over ``max_bytes`` (413), of the wrong media type (415), nested
    more than ``MAX_NESTING`` deep (400)."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["method"] not in _METHODS_WITH_BODY:
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        body, size = [], 0
        declared = headers.get("content-length", "0")
        too_large = declared.isdigit() and int(declared) > self.max_bytes
        while not too_large:
            message = await receive()
            if message["type"] != "http.request":
                return
            body.append(message.get("body", b""))
            size += len(body[-1])
            too_large = size > self.max_bytes
            if not message.get("more_body", False):
                break
        content = b"".join(body)
        refusal = self._refusal(Request(scope), headers, size, too_large) or _too_deep(
            Request(scope), headers, content
        )
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        await self.app(scope, _replay(content, receive), send)

    def _refusal(self, request: Request, headers: Headers, size: int, too_large: bool) -> ASGIApp | None:
        if too_large:
            error = TooLarge(
                rule=f"a body must be at most {self.max_bytes} bytes",
                value=headers.get("content-length", f"more than {self.max_bytes}"),
                remedy="Send less in one request.",
            )
            return problem_response(request, 413, rule=error.rule, value=error.value, remedy=error.remedy)
        media = _media(headers)
        allowed = _MEDIA_TYPES if request.url.path.startswith("/v1/") else _MEDIA_TYPES | {_FORM}
        if size and media not in allowed:
            return problem_response(
                request,
                415,
                rule="the body must be application/json",
                value=media or "no Content-Type",
                remedy="Send Content-Type: application/json.",
            )
        return None


def _too_deep(request: Request, headers: Headers, content: bytes) -> ASGIApp | None:
    if _media(headers) not in _MEDIA_TYPES:
        return None
    depth = 0
    for found in _TEXT_OR_BRACKET.finditer(content):
        mark = found[0]
        depth += 1 if mark in b"[{" else -1 if mark in b"]}" else 0
        if depth > MAX_NESTING:
            return problem_response(
                request,
                400,
                rule=f"the body must be nested at most {MAX_NESTING} deep",
                value=f"one more at byte {found.start()}",
                remedy="Take brackets away; /v1/openapi.json has the schema.",
            )
    return None


def _media(headers: Headers) -> str:
    return headers.get("content-type", "").split(";")[0].strip().lower()


def _replay(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


class RequestMetrics:
    """Counts requests and their seconds by route template (never by raw path: cardinality stays bounded)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.count = Counter(
            "flatpeak_requests", "Requests answered", ["method", "route", "status"], registry=registry
        )
        self.seconds = Histogram(
            "flatpeak_request_seconds", "Seconds until the response started", ["route"], registry=registry
        )

    def wrap(self, app: ASGIApp) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
        """``app`` with its requests counted."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            started = time.perf_counter()

            async def observe(message: Message) -> None:
                if message["type"] == "http.response.start":
                    route = getattr(scope.get("route"), "path", "(none)")
                    self.count.labels(scope["method"], route, message["status"]).inc()
                    self.seconds.labels(route).observe(time.perf_counter() - started)
                await send(message)

            await app(scope, receive, observe)

        return counted
