"""A database and its sessions: SQLite (WAL, immediate write transactions) or PostgreSQL (psycopg)."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError
from sqlalchemy.orm import Session

from cost_model.errors import RuleError
from db.tables import Event

DEFAULT_URL = "sqlite:///flatpeak.db"
_BUSY_S = 60.0
_READ_ONLY = "flatpeak_read_only"
_PENDING_EVENTS = "flatpeak_pending_events"
_SQLITE_PASSING = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_PROTOCOL,
)
# SQLSTATE: rolled back (a deadlock), resources (a full disk), a lock or the time for a statement not to be had.
_POSTGRES_PASSING = ("40", "53", "55P03", "57014")
# Any number, the same in every process of flatpeak: the names of two advisory locks.
_MIGRATION_LOCK, _EVENT_LOCK = 7_301_554, 7_301_555


def database_url(url: str | None = None) -> str:
    """The URL asked for, else ``$FLATPEAK_DATABASE``, else ``flatpeak.db`` in the working directory."""
    return url or os.environ.get("FLATPEAK_DATABASE") or DEFAULT_URL


def queue_event(session: Session, row: Event) -> None:
    """Append ``row`` when the session's transaction commits.

    Readers follow events by ascending id, so ids must become visible in order. On PostgreSQL a lock makes
    sure of it; taken last, just before the commit, it cannot be part of a deadlock.
    """
    session.info.setdefault(_PENDING_EVENTS, []).append(row)


class DatabaseUnreachable(RuleError):
    """The database did not answer, was too busy or full, or went away while it was spoken to.

    What was being written may be lost; the same may succeed later.
    """


class Database:
    """An engine and its sessions.

    Args:
        url: ``sqlite:///path`` or ``postgresql+psycopg://user:password@host/name``.

    Raises:
        RuleError: the URL cannot be read, or names another database. A password in it is never shown.
    """

    def __init__(self, url: str | None = None) -> None:
        self._url = _read_url(database_url(url))
        self.dialect = self._url.get_backend_name()
        options: dict[str, Any] = {"json_serializer": partial(json.dumps, allow_nan=False)}
        if self.dialect == "sqlite":
            options["connect_args"] = {"timeout": _BUSY_S}
        else:
            options |= {"pool_pre_ping": True, "connect_args": {"connect_timeout": 10}}
        self.engine: Engine = create_engine(self._url, **options)
        if self.dialect == "sqlite":
            event.listen(self.engine, "connect", _prepare_sqlite)
            event.listen(self.engine, "begin", _begin_sqlite)

    @property
    def url(self) -> str:
        """The URL with its password masked."""
        return self._url.render_as_string(hide_password=True)

    @contextmanager
    def session(self) -> Iterator[Session]:
        """A transaction that writes: committed at the end, rolled back by an exception."""
        with self._open(read_only=False) as session:
            yield session

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A transaction that only reads: on SQLite it does not wait for writers, nor they for it."""
        with self._open(read_only=True) as session:
            yield session

    @contextmanager
    def _open(self, *, read_only: bool) -> Iterator[Session]:
        with self._explained(), Session(self.engine, expire_on_commit=False) as session:
            session.connection(execution_options={_READ_ONLY: read_only})
            yield session
            _flush_events(session, self.dialect)
            session.commit()

    def ping(self) -> None:
        """Ask the database for an answer.

        Raises:
            RuleError: it cannot be reached.
        """
        with self.reading() as session:
            session.execute(text("SELECT 1"))

    def migrate(self) -> None:
        """Bring the tables to the newest version; safe when several processes do it at once."""
        with self._explained(), self.engine.begin() as connection:
            if self.dialect == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _MIGRATION_LOCK})
            config = _alembic_config(connection)
            self._check_revision(connection, config)
            command.upgrade(config, "head")

    def check_schema(self) -> None:
        """Hold the schema to the version this release needs.

        Raises:
            RuleError: it is newer, older, or not there.
        """
        with self._explained(), self.engine.connect() as connection:
            config = _alembic_config(connection)
            found = self._check_revision(connection, config)
            head = ScriptDirectory.from_config(config).get_current_head()
            if found != head:
                raise RuleError(
                    rule=f"the database must have the current schema ({head})",
                    value=found or "no schema",
                    remedy="Run `flatpeak db migrate` on it first.",
                )

    def _check_revision(self, connection: Connection, config: Config) -> str | None:
        """The schema's version, refused when this release has never heard of it."""
        found = MigrationContext.configure(connection).get_current_revision()
        known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
        if found is not None and found not in known:
            raise RuleError(
                rule="the database's schema must not be newer than this release of flatpeak",
                value=f"{self.url}: version {found}",
                remedy="Use the release that migrated it, or another database.",
            )
        return found

    def close(self) -> None:
        """Give the connections back."""
        self.engine.dispose()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OperationalError as error:
            if _will_pass(error):
                raise DatabaseUnreachable(
                    rule="the database must be free to work, with room on its disk",
                    value=self.url,
                    remedy=f"Try again; if it goes on, see what holds it or fills its disk. {_cause(error)}",
                ) from error
            # a server that has restarted meanwhile answers again, and has forgotten the transaction
            if not error.connection_invalidated and self._reachable():
                raise _explain_schema(error, self.url) or error from error
            raise DatabaseUnreachable(
                rule="the database must be reachable",
                value=self.url,
                remedy=f"Start it, or name another with --database or FLATPEAK_DATABASE. {_cause(error)}",
            ) from error
        except DBAPIError as error:
            raise _explain_schema(error, self.url) or error from error

    def _reachable(self) -> bool:
        try:
            with self.engine.connect() as connection:
                connection.execution_options(**{_READ_ONLY: True}).exec_driver_sql("SELECT 1")
        except OperationalError:
            return False
        return True


def _read_url(text_: str) -> URL:
    remedy = "Write sqlite:///path/to/file.db or postgresql+psycopg://user:password@host/name."
    try:
        url = make_url(text_)
        if url.drivername in ("postgresql", "postgres"):
            url = url.set(drivername="postgresql+psycopg")
        url.get_dialect()
    except (ArgumentError, NoSuchModuleError, ValueError):
        # the text itself may hold a password: show only what comes before the address
        scheme = text_.split("://", maxsplit=1)[0][:32] if "://" in text_ else "a text without ://"
        raise RuleError(
            rule="a database URL must name SQLite or PostgreSQL",
            value=scheme,
            remedy=remedy,
        ) from None
    if url.drivername not in ("sqlite", "postgresql+psycopg"):
        raise RuleError(
            rule="the database must be SQLite or PostgreSQL with psycopg", value=url.drivername, remedy=remedy
        )
    if url.drivername == "sqlite":
        if url.database in (None, "", ":memory:"):
            raise RuleError(
                rule="a SQLite database must be a file, as several processes share it",
                value=url.database,
                remedy=remedy,
            )
        folder = Path(str(url.database)).absolute().parent
        if not folder.is_dir():
            raise RuleError(
                rule="the folder of a SQLite database must exist",
                value=str(folder),
                remedy="Create it, or name another file with --database or FLATPEAK_DATABASE.",
            )
    return url


def _cause(error: DBAPIError) -> str:
    """The driver's first line; drivers do not print passwords."""
    return f"The driver said: {str(error.orig).strip().splitlines()[0]}" if str(error.orig).strip() else ""


def _will_pass(error: DBAPIError) -> bool:
    """Whether the database is there and could not do it at this moment: locked, deadlocked, full."""
    code = getattr(error.orig, "sqlite_errorcode", None)
    if code is not None:
        return code & 0xFF in _SQLITE_PASSING
    return str(getattr(error.orig, "sqlstate", None)).startswith(_POSTGRES_PASSING)


def _explain_schema(error: DBAPIError, url: str) -> RuleError | None:
    said = str(error.orig).lower()
    if "no such table" in said or ("relation" in said and "does not exist" in said):
        return RuleError(
            rule="the database must hold flatpeak's tables",
            value=url,
            remedy="Run `flatpeak db migrate` on it first.",
        )
    return None


def _prepare_sqlite(connection: Any, record: object) -> None:
    del record
    connection.isolation_level = None  # the driver must not begin transactions by itself: see _begin_sqlite
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {int(_BUSY_S * 1000)}")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.execute("PRAGMA synchronous = NORMAL")
    if cursor.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        cursor.execute("PRAGMA journal_mode = WAL")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that begins deferred and then writes fails at once when another wrote in between, however
    # long the busy timeout. One that takes the write lock first waits its turn.
    read_only = connection.get_execution_options().get(_READ_ONLY, False)
    connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")


def _flush_events(session: Session, dialect: str) -> None:
    rows = session.info.pop(_PENDING_EVENTS, [])
    if not rows:
        return
    session.flush()
    if dialect == "postgresql":
        session.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _EVENT_LOCK})
    for row in rows:
        session.add(row)
        session.flush()


def _alembic_config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(resources.files("db") / "migrations"))
    config.attributes["connection"] = connection
    return config
