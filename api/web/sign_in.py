"""The login form: it keeps a token in a cookie that scripts cannot read and other sites cannot send."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qs

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse

from api.auth import COOKIE, token_scopes
from api.routes.context import Store
from api.web.templates import render

router = APIRouter()
_WEEK_S = 7 * 24 * 3600


def _own_address(address: str) -> str:
    """``address`` when it is a path of this site, else the first page: never a way out to another host."""
    inside = address.startswith("/") and not address.startswith(("//", "/\\"))
    return address if inside and address.isprintable() else "/"


@router.get("/login")
def login_form(request: Request, next: Annotated[str, Query(max_length=2000)] = "/") -> Response:  # noqa: A002
    """The form."""
    return render(request, "login.html", {"next": _own_address(next), "wrong": False})


@router.post("/login")
async def login(request: Request, store: Store) -> Response:
    """Check the token and set the cookie."""
    form = parse_qs((await request.body()).decode("utf-8", "replace"), max_num_fields=10)
    text, target = form.get("token", [""])[0].strip(), _own_address(form.get("next", ["/"])[0])
    if not text or token_scopes(store, text) is None:
        return render(request, "login.html", {"next": target, "wrong": True}, status=401)
    response = RedirectResponse(target, status_code=303)
    response.set_cookie(
        COOKIE,
        text,
        max_age=_WEEK_S,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response


@router.post("/logout")
def logout() -> Response:
    """Forget the cookie."""
    response = RedirectResponse("/login", status_code=303)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return response
