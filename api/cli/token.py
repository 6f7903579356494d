"""``flatpeak token``: who may talk to a server that others can reach."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from api.cli.console import DatabaseOption, JsonFlag, emit_json, err, out, table
from api.errors import Conflict, NotFound
from api.schemas.common import timestamp
from db.tables import Token

DAY_S = 86_400.0


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(help="Make, list and revoke bearer tokens.")
    group.command("create")(create)
    group.command("list")(show)
    group.command("revoke")(revoke)
    app.add_typer(group, name="token")


def create(
    *,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Whose token it is.")] = "default",
    scope: Annotated[
        list[str] | None,
        typer.Option("--scope", metavar="SCOPE", help="read, write; repeatable. Default: both."),
    ] = None,
    days: Annotated[
        float | None, typer.Option("--days", metavar="DAYS", help="Days until it expires; default: never.")
    ] = None,
    if_none: Annotated[
        bool, typer.Option("--if-none", help="Do nothing when a valid token exists (for a first start).")
    ] = False,
    database: DatabaseOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a token. It is printed once and kept only as a hash.

    Example:

      flatpeak token create --name ci --scope read --scope write --days 90
    """
    from api.services.store import open_database
    from db.repositories import TokenRepository

    if days is not None and not 0 < days <= 36_500:
        raise typer.BadParameter("must lie between 0 and 36500", param_hint="--days")
    store = open_database(database)
    with store.session() as session:
        tokens = TokenRepository(session)
        if if_none and tokens.any_valid():
            if as_json:
                emit_json({"token": None})
            else:
                err.print("A valid token exists already; none was made.", markup=False)
            store.close()
            return
        row, text = tokens.create(
            name, scope or ["read", "write"], lifetime_s=None if days is None else days * DAY_S
        )
        view = _view(row)
    store.close()
    if as_json:
        emit_json({**view, "token": text})
    else:
        err.print(f"Token {row.id} for {name}; this is the only time it is shown:", markup=False)
        out.print(text, markup=False, soft_wrap=True)


def show(database: DatabaseOption = None, as_json: JsonFlag = False) -> None:
    """List the tokens; their text is not kept.

    Example:

      flatpeak token list
    """
    from api.services.store import open_database
    from db.repositories import TokenRepository

    store = open_database(database)
    with store.reading() as session:
        tokens = [_view(row) for row in TokenRepository(session).all()]
    store.close()
    if as_json:
        emit_json({"items": tokens})
        return
    keys = ("id", "name", "scopes", "created_at", "last_used_at", "expires_at", "revoked_at")
    rows = [tuple(" ".join(t[k]) if k == "scopes" else str(t[k] or "–") for k in keys) for t in tokens]
    out.print(table("Tokens", keys, rows))


def revoke(
    token_id: Annotated[str, typer.Argument(metavar="TOKEN_ID", help="As `flatpeak token list` shows it.")],
    database: DatabaseOption = None,
    as_json: JsonFlag = False,
) -> None:
    """End a token now.

    Example:

      flatpeak token revoke tok_01jx…
    """
    from api.services.store import open_database
    from db.repositories import TokenRepository

    store = open_database(database)
    with store.session() as session:
        tokens = TokenRepository(session)
        ended = tokens.revoke(token_id)
        known = any(row.id == token_id for row in tokens.all())
    store.close()
    if not ended and known:
        raise Conflict(
            rule="a token can be revoked once", value=token_id, remedy="Nothing is left to do: it has ended."
        )
    if not ended:
        raise NotFound("token", token_id)
    if as_json:
        emit_json({"id": token_id, "revoked": True})
    else:
        out.print(f"Revoked {token_id}", markup=False)


def _view(row: Token) -> dict[str, Any]:
    return {
        "id": row.id,
        "name": row.name,
        "scopes": row.scopes_json,
        "created_at": timestamp(row.created_at),
        "last_used_at": timestamp(row.last_used_at),
        "expires_at": timestamp(row.expires_at),
        "revoked_at": timestamp(row.revoked_at),
    }
