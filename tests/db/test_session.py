"""Databases: URLs, reachability, migrations, transactions."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text

from cost_model.errors import RuleError
from db.repositories import EventRepository, ModelRepository, SweepRepository
from db.session import Database, DatabaseUnreachable, database_url
from db.tables import Base
from tests.db.test_trials import make_sweep
from tests.postgres import drop_database, new_database


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


def test_a_lock_that_others_hold_passes(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("db.session._BUSY_S", 0.05)
    sweep_id = make_sweep(database, 0)
    url = database._url.render_as_string(hide_password=False)
    other = Database(url)

    def lock() -> None:
        with other.session() as session:
            if other.dialect == "postgresql":
                session.execute(text("SET LOCAL lock_timeout = '50ms'"))
            SweepRepository(session).get(sweep_id, lock=True)

    with database.session() as holder:
        SweepRepository(holder).get(sweep_id, lock=True)
        with pytest.raises(DatabaseUnreachable, match="free to work") as refused:
            lock()
        assert "lock" in refused.value.remedy
    lock()
    other.close()


@pytest.mark.postgres
def test_two_writers_in_each_other_s_way_are_told_to_try_again() -> None:
    url = new_database()
    databases = [Database(url), Database(url)]
    databases[0].migrate()
    sweeps = [make_sweep(databases[0], 0) for _ in range(2)]
    both_hold = threading.Barrier(2)
    refused: list[Exception] = []

    def write(me: int) -> None:
        try:
            with databases[me].session() as session:
                SweepRepository(session).get(sweeps[me], lock=True)
                both_hold.wait(30)
                SweepRepository(session).get(sweeps[1 - me], lock=True)
        except DatabaseUnreachable as error:
            refused.append(error)

    threads = [threading.Thread(target=write, args=(me,)) for me in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in databases:
        one.close()
    drop_database(url)
    assert ["deadlock" in str(error) for error in refused] == [True]


def test_a_full_disk_may_pass(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/x.db")
    database.migrate()

    def write(most_pages: int) -> None:
        with database.session() as session:
            session.execute(text(f"PRAGMA max_page_count = {most_pages}"))
            ModelRepository(session).put("m", {"text": "x" * 1_000_000})

    with pytest.raises(DatabaseUnreachable, match="full"):
        write(1)  # no larger than it is already
    write(1_000_000)
    database.close()


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
