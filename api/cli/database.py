"""``flatpeak db``: the database's schema."""

from __future__ import annotations

import typer

from api.cli.console import DatabaseOption, JsonFlag, emit_json, out
from api.errors import RuleError, UnreachableDatabase


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(help="Prepare and check the database.")
    group.command("migrate")(migrate)
    group.command("check")(check)
    app.add_typer(group, name="db")


def migrate(database: DatabaseOption = None, as_json: JsonFlag = False) -> None:
    """Bring the schema to the version this flatpeak needs.

    Example:

      flatpeak db migrate --database postgresql+psycopg://flatpeak@db/flatpeak
    """
    from db.session import Database

    store = Database(database)
    store.ping()
    store.migrate()
    url = store.url
    store.close()
    if as_json:
        emit_json({"database": url, "migrated": True})
    else:
        out.print(f"{url}: the schema is current", markup=False)


def check(database: DatabaseOption = None, as_json: JsonFlag = False) -> None:
    """Ask the database for an answer and for flatpeak's tables.

    Example:

      flatpeak db check --database sqlite:///flatpeak.db
    """
    from db.repositories import SweepRepository
    from db.session import Database

    store = Database(database)
    store.ping()
    try:
        store.check_schema()
    except RuleError as error:  # the request was right, the database is not: exit code 1
        raise UnreachableDatabase(rule=error.rule, value=error.value, remedy=error.remedy) from error
    with store.reading() as session:
        active = len(SweepRepository(session).active())
    url = store.url
    store.close()
    if as_json:
        emit_json({"database": url, "ok": True, "active_sweeps": active})
    else:
        out.print(f"{url}: answers, {active} active sweep(s)", markup=False)
