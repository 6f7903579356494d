"""Who may do what: bearer tokens with scopes, or a cookie that holds one for the pages."""

from __future__ import annotations

import time
from typing import Annotated
from urllib.parse import quote

from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from fastapi.security.http import HTTPAuthorizationCredentials

from api.errors import BadRequest, Forbidden, RuleError, Unauthorized
from api.settings import Settings, is_loopback
from db.repositories import TokenRepository
from db.session import Database

COOKIE = "flatpeak_token"
_TOUCH_S = 60.0
_bearer = HTTPBearer(auto_error=False, description="A token made by `flatpeak token create`")


class SignInNeeded(Exception):
    """A page was asked for without a valid token: send the browser to the login form."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.location = f"/login?next={quote(address, safe='')}"


def require_a_token(database: Database, host: str) -> None:
    """Refuse to serve on an address others can reach while no token exists.

    Raises:
        RuleError: with the remedy.
    """
    with database.reading() as session:
        if TokenRepository(session).any_valid():
            return
    raise RuleError(
        rule="an address other machines can reach needs at least one valid token",
        value=host,
        remedy="Run `flatpeak token create --name NAME --scope read --scope write`, or serve on 127.0.0.1.",
    )


def token_scopes(database: Database, text: str) -> frozenset[str] | None:
    """Scopes of a valid token, None for any other text."""
    with database.reading() as session:
        row = TokenRepository(session).verify(text)
        if row is None:
            return None
        stale = row.last_used_at is None or time.time() - row.last_used_at > _TOUCH_S
        token_id, scopes = row.id, frozenset(row.scopes_json)
    if stale:
        with database.session() as session:
            TokenRepository(session).touch(token_id)
    return scopes


def _check(request: Request, bearer: str | None, scope: str) -> None:
    settings: Settings = request.app.state.settings
    if not settings.tokens_required:
        host = request.url.hostname or ""
        if settings.loopback_hosts_only and not is_loopback(host):
            raise BadRequest(
                rule="without tokens this server answers to loopback names only",
                value=host,
                remedy="Use http://127.0.0.1 or http://localhost, or serve with tokens.",
            )
        return
    text = bearer or request.cookies.get(COOKIE)
    scopes = token_scopes(request.app.state.database, text) if text else None
    if scopes is None:
        raise Unauthorized(
            rule="every request needs a valid token",
            value="no token" if not text else "an unknown, revoked or expired token",
            remedy="Send Authorization: Bearer TOKEN; `flatpeak token create` makes one.",
        )
    if scope not in scopes:
        raise Forbidden(
            rule=f"this request needs the scope {scope}",
            value=sorted(scopes),
            remedy=f"Use a token made with --scope {scope}.",
        )


Bearer = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]


def reads(request: Request, bearer: Bearer) -> None:
    """Dependency of routes that only read."""
    _check(request, bearer.credentials if bearer else None, "read")


def writes(request: Request, bearer: Bearer) -> None:
    """Dependency of routes that change something."""
    _check(request, bearer.credentials if bearer else None, "write")


def page_reads(request: Request) -> None:
    """Dependency of pages: as :func:`reads`, but a browser without a token is sent to the login form."""
    try:
        _check(request, None, "read")
    except Unauthorized:
        query = f"?{request.url.query}" if request.url.query else ""
        raise SignInNeeded(request.url.path + query) from None
