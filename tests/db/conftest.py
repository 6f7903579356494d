"""Databases for the tests of this room: every contract runs on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from db.session import Database
from tests.postgres import drop_database, new_database


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a database without tables, of either kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'flatpeak.db'}"
        return
    url = new_database()
    yield url
    drop_database(url)


@pytest.fixture
def database(empty_url: str) -> Iterator[Database]:
    """A migrated database of either kind."""
    database = Database(empty_url)
    database.migrate()
    yield database
    database.close()
