"""The heartbeat of a running trial, while its database is locked, broken or gone."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from sqlalchemy import text

from db.repositories import Claim, SweepRepository, TrialRepository
from db.session import Database
from tests.tuner.conftest import ToySpec
from tuner.sweeping.sweep import create_sweep
from tuner.sweeping.trial import Heart, Leases

LEASES = Leases(lease_s=3.0, heartbeat_s=1.0)


@pytest.fixture
def claim(database: Database, toy_spec: ToySpec, monkeypatch: pytest.MonkeyPatch) -> Claim:
    monkeypatch.setattr("db.session._BUSY_S", 0.2)
    create_sweep(database, toy_spec([1], ["ok"]))
    with database.session() as session:
        claim = TrialRepository(session).claim("a/1/1", lease_s=LEASES.lease_s)
        assert claim is not None
        TrialRepository(session).start(claim, lease_s=LEASES.lease_s)
    return claim


def lease_end(database: Database) -> float:
    with database.reading() as session:
        (attempt,) = TrialRepository(session).live_attempts()
    return attempt.lease_expires_at


def until(met: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if met():
            return True
        time.sleep(0.02)
    return False


def heart_of(database: Database, claim: Claim, leases: Leases = LEASES) -> Heart:
    return Heart(Database(database.url), claim.claim_id, leases, time.monotonic())


def test_a_lock_shorter_than_the_lease_is_outlived(database: Database, claim: Claim) -> None:
    with heart_of(database, claim, Leases(lease_s=60.0, heartbeat_s=0.1)) as heart:
        with database.session() as holder:
            SweepRepository(holder).active()
            time.sleep(0.5)  # more than the patience of one heartbeat
        before = lease_end(database)
        assert until(lambda: lease_end(database) > before)
        assert not heart.must_stop


def test_ranks_stop_before_others_may_take_their_trial(database: Database, claim: Claim) -> None:
    with heart_of(database, claim) as heart:
        with database.session() as holder:
            assert until(lambda: heart.must_stop)
            assert TrialRepository(holder).reap() == []
            assert until(lambda: bool(TrialRepository(holder).reap()))
        assert heart.must_stop
        assert not heart.cancelled


def test_no_error_ends_the_heartbeat(database: Database, claim: Claim) -> None:
    with heart_of(database, claim, Leases(lease_s=60.0, heartbeat_s=0.05)) as heart:
        with database.session() as session:
            session.execute(text("ALTER TABLE attempt RENAME TO mislaid"))
        time.sleep(0.3)
        with database.session() as session:
            session.execute(text("ALTER TABLE mislaid RENAME TO attempt"))
        before = lease_end(database)
        assert until(lambda: lease_end(database) > before)
        assert not heart.must_stop
