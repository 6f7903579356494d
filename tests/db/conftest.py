"""Databases for the tests of this room: every contract runs on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from db.session import Database
from tests.postgres import KINDS, fresh_url


@pytest.fixture(params=KINDS)
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a database without tables, of either kind."""
    with fresh_url(request.param, tmp_path) as url:
        yield url


@pytest.fixture
def database(empty_url: str) -> Iterator[Database]:
    """A migrated database of either kind."""
    database = Database(empty_url)
    database.migrate()
    yield database
    database.close()
