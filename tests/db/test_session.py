"""Databases: URLs, reachability, migrations, transactions."""

from __future__ import annotations

from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text

from cost_model.errors import RuleError
from db.repositories import EventRepository, ModelRepository, SweepRepository
from db.session import Database, database_url
from db.tables import Base
from tests.db.test_trials import make_sweep


def test_migrations_make_the_tables_that_the_code_declares(empty_url: str) -> None:
    database = Database(empty_url)
    database.migrate()
    database.migrate()
    with database.engine.connect() as connection:
        differences = compare_metadata(MigrationContext.configure(connection), Base.metadata)
    assert differences == []
    database.close()


def test_a_database_without_tables_says_what_to_run(empty_url: str) -> None:
    database = Database(empty_url)
    with pytest.raises(RuleError, match="flatpeak db migrate"), database.reading() as session:
        SweepRepository(session).page()
    database.close()


def test_an_exception_rolls_everything_back(database: Database) -> None:
    sweep_id = make_sweep(database, 0)

    def half() -> None:
        with database.session() as session:
            ModelRepository(session).put("half", {})
            EventRepository(session).append(sweep_id, "half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        half()
    with database.reading() as session:
        assert ModelRepository(session).page().items == []
        assert [e.kind for e in EventRepository(session).after()] == ["sweep.queued"]


def test_events_are_numbered_upwards_and_followed_from_any_point(database: Database) -> None:
    first, second = make_sweep(database, 0), make_sweep(database, 0)
    with database.session() as session:
        for i in range(3):
            EventRepository(session).append(first, "tick", payload={"i": i})
    with database.reading() as session:
        events = EventRepository(session)
        of_first = events.after(sweep_id=first)
        assert [e.payload_json.get("i") for e in of_first] == [None, 0, 1, 2]
        assert [e.id for e in events.after(of_first[-2].id)] == [of_first[-1].id]
        assert events.last_id() == events.last_id(first) == of_first[-1].id
        assert events.last_id(second) < of_first[1].id
        assert events.last_id("swp_none") == 0


def test_an_unreachable_database_is_named_without_its_password() -> None:
    database = Database("postgresql+psycopg://me:s3cret@127.0.0.1:9/none")
    for use in (database.ping, database.migrate):
        with pytest.raises(RuleError) as refused:
            use()
        assert "reachable" in refused.value.rule
        assert refused.value.remedy
        assert "s3cret" not in str(refused.value)
        assert "s3cret" not in str(refused.value.__cause__)
    assert "s3cret" not in database.url


@pytest.mark.parametrize(
    "url", ["mysql://me:s3cret@host/x", "me:s3cret@host", "sqlite://", "sqlite:////no/such/folder/f.db"]
)
def test_a_url_that_cannot_serve_is_refused(url: str) -> None:
    with pytest.raises(RuleError) as refused:
        Database(url)
    assert refused.value.remedy
    assert "s3cret" not in str(refused.value)


def test_the_environment_names_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FLATPEAK_DATABASE", raising=False)
    assert database_url() == "sqlite:///flatpeak.db"
    monkeypatch.setenv("FLATPEAK_DATABASE", f"sqlite:///{tmp_path}/x.db")
    assert Database().url.endswith("x.db")
    assert database_url("sqlite:///y.db") == "sqlite:///y.db"


def test_sqlite_reads_do_not_wait_for_a_writer(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/x.db")
    database.migrate()
    with database.session() as writer:
        ModelRepository(writer).put("m", {})
        with database.reading() as reader:
            assert reader.scalar(text("SELECT count(*) FROM stored_model")) == 0
    with database.reading() as reader:
        assert reader.scalar(text("SELECT count(*) FROM stored_model")) == 1
        assert reader.scalar(text("PRAGMA journal_mode")) == "wal"
    database.close()
