"""Opening the database the way every command and the server do."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy.exc import DBAPIError

from api.errors import UnreachableDatabase
from cost_model.errors import RuleError
from db.session import DEFAULT_URL, Database, database_url


def open_database(url: str | None = None) -> Database:
    """A database that answered just now.

    A SQLite file is brought to the current schema on the way: it belongs to whoever runs the command. A
    server's schema is changed by ``flatpeak db migrate`` only.

    Raises:
        UnreachableDatabase: it does not answer, or its schema is missing.
        RuleError: the URL is not readable.
    """
    database = Database(url)
    try:
        database.ping()
        if database.dialect == "sqlite":
            database.migrate()
    except RuleError as error:
        database.close()
        raise UnreachableDatabase(rule=error.rule, value=error.value, remedy=error.remedy) from error
    except DBAPIError as error:
        database.close()
        raise UnreachableDatabase(
            rule="the database must answer",
            value=database.url,
            remedy=f"Check the file or the server ({type(error.orig).__name__}).",
        ) from error
    return database


def database_in_use(url: str | None) -> bool:
    """Whether a database was named, or the default file is there: else reading from one is pointless."""
    chosen = database_url(url)
    return chosen != DEFAULT_URL or Path(DEFAULT_URL.removeprefix("sqlite:///")).exists()
