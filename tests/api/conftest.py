"""A real server on a free loopback port, a migrated database, and a client that talks to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import sleep

import httpx
import pytest
import uvicorn

from api.app import create_app
from api.cli.serve import listen
from api.settings import Settings
from db.session import Database


@dataclass(frozen=True)
class Served:
    """A running server and its database."""

    address: str
    database: Database
    client: httpx.Client


Serve = Callable[..., AbstractContextManager[Served]]


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'flatpeak.db'}"


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    store = Database(database_url)
    store.migrate()
    yield store
    store.close()


@contextmanager
def running(settings: Settings, database: Database) -> Iterator[Served]:
    """Serve in a thread; the socket listens before the first request is sent."""
    listener = listen("127.0.0.1", 0)
    app = create_app(settings)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        sleep(0.01)
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        with httpx.Client(base_url=address, timeout=30) as client:
            yield Served(address, database, client)
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listener.close()


@pytest.fixture
def serve(database: Database, database_url: str) -> Serve:
    """``with serve(tokens_required=True) as served``."""

    def start(**settings: object) -> AbstractContextManager[Served]:
        return running(Settings(database_url=database_url, event_poll_s=0.05, **settings), database)  # type: ignore[arg-type]

    return start


@pytest.fixture
def served(serve: Serve) -> Iterator[Served]:
    with serve() as running_server:
        yield running_server
