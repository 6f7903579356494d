"""A throwaway PostgreSQL server for tests: ``$FLATPEAK_TEST_POSTGRES``, or one started from local binaries."""

from __future__ import annotations

import atexit
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import URL, make_url

from db.ids import new_id

_USER = "flatpeak"
_restart: dict[str, Callable[[], None]] = {}


class PostgresMissing(RuntimeError):
    """There is neither a server named by the environment nor binaries to start one."""


@cache
def server() -> URL:
    """URL of a running server's maintenance database; started on first use, stopped when Python ends.

    The server that this starts listens on a Unix socket in its own folder only, so several test runs do not
    meet, and writes nothing to disk for safety's sake.
    """
    named = os.environ.get("FLATPEAK_TEST_POSTGRES")
    if named:
        return make_url(named).set(drivername="postgresql+psycopg")
    binaries = _binaries()
    folder = Path(tempfile.mkdtemp(prefix="fppg"))
    as_user = _unprivileged()
    if "user" in as_user:
        shutil.chown(folder, as_user["user"], as_user["group"])
    data = folder / "data"

    def call(*command: str | Path) -> None:
        done = subprocess.run(
            command, cwd=folder, check=False, capture_output=True, text=True, timeout=120, **as_user
        )
        if done.returncode:
            raise PostgresMissing(f"{command[0]} failed: {done.stderr or done.stdout}")

    call(binaries / "initdb", "-D", data, "-U", _USER, "--auth=trust", "--no-sync", "--encoding=UTF8")
    options = (
        f"-c listen_addresses='' -c unix_socket_directories={folder} -c fsync=off -c max_connections=100"
    )
    call(binaries / "pg_ctl", "-D", data, "-w", "-l", folder / "log", "-o", options, "start")

    def restart_it() -> None:
        call(binaries / "pg_ctl", "-D", data, "-m", "immediate", "stop")
        call(binaries / "pg_ctl", "-D", data, "-w", "-l", folder / "log", "-o", options, "start")

    _restart["server"] = restart_it

    def stop() -> None:
        subprocess.run(
            [binaries / "pg_ctl", "-D", data, "-m", "immediate", "stop"],
            cwd=folder,
            check=False,
            capture_output=True,
            **as_user,
        )
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(stop)
    return URL.create("postgresql+psycopg", username=_USER, database="postgres", query={"host": str(folder)})


def new_database() -> str:
    """URL of an empty database of its own."""
    name = new_id("t")
    engine = create_engine(server(), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f'CREATE DATABASE "{name}"'))
    engine.dispose()
    return server().set(database=name).render_as_string(hide_password=False)


def drop_database(url: str) -> None:
    """Remove a database that :func:`new_database` made, with whoever is still connected to it."""
    engine = create_engine(server(), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f'DROP DATABASE IF EXISTS "{make_url(url).database}" WITH (FORCE)'))
    engine.dispose()


KINDS = ("sqlite", pytest.param("postgresql", marks=pytest.mark.postgres))
"""Parameters of tests and fixtures that hold for both databases."""


@contextmanager
def fresh_url(kind: str, folder: Path) -> Iterator[str]:
    """URL of a database without tables: a file in ``folder``, or one on the server that is dropped afterwards."""
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'flatpeak.db'}"
        return
    url = new_database()
    yield url
    drop_database(url)


def _binaries() -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: int(p.parts[-3]))
    on_path = shutil.which("initdb")
    if found:
        return found[-1].parent
    if on_path:
        return Path(on_path).resolve().parent
    raise PostgresMissing(
        "These tests need PostgreSQL: install its server package, or name one in FLATPEAK_TEST_POSTGRES."
    )


def _unprivileged() -> dict[str, Any]:
    """PostgreSQL refuses to run as root: hand its processes to the user that its package made, or to nobody."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    raise PostgresMissing("PostgreSQL cannot run as root, and there is no user `postgres` or `nobody`.")


def throw_out(url: str) -> None:
    """End every connection to a database, as the server's restart would."""
    engine = create_engine(server(), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(
            text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"),
            {"name": make_url(url).database},
        )
    engine.dispose()


def can_restart() -> bool:
    """Whether the server is this process's own."""
    server()
    return "server" in _restart


def restart() -> bool:
    """Stop the server that this process started, as a crash would, and start it again; False if it is not ours."""
    if can_restart():
        _restart["server"]()
    return can_restart()
