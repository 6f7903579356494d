"""A sweep among three workers while everything it needs is killed at random, again and again.

SIGKILL hits ranks, workers, the controller (the process that makes and drives the sweep), the HTTP API, and on a
Ray cluster a node's raylet with all it runs; the database goes away and comes back. Four points of the sweep
misbehave by themselves: one raises, one fills the host's memory, one a device's, one hangs in a collective.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from sqlalchemy.engine import make_url

from cost_model.errors import RuleError
from db.lifecycle import SWEEP_TERMINAL, TERMINAL, SweepState, TrialState
from db.repositories import EventRepository, SampleRepository, SweepRepository, TrialRepository
from db.session import Database
from tests import postgres
from tests.ray_cluster import agents, cluster, lose_a_node, placement_groups
from tests.tuner import chaos_adapter as chaos
from tests.tuner.chaos_fleet import Fleet, Follower
from tuner.executors.folder import abandoned

# a minute on an idle machine: most of it is processes that start, again and again
pytestmark = pytest.mark.timeout(600)

_ALLOWANCE_S = 540.0
_POINTS, _REPEATS, _RANKS = 60, 3, 2
_LOCKED_S = 3.0
BLOWS = ["rank", "rank", "rank", "worker", "worker", "controller", "api", "database"]
RAY_BLOWS = ["rank", "rank", "worker", "controller", "api", "node", "database"]


def write_sweep(file: Path, log: Path) -> None:
    spec = {
        "operator": chaos.NAME,
        "target": {"ranks": _RANKS},
        "shape": {"log": str(log), "pause_ms": 40},
        "space": {"point": list(range(_POINTS))},
        "repeats": _REPEATS,
        "memory_limit_bytes": chaos.LIMIT_BYTES,
        "timers": {"stall_s": 10, "cancel_s": 1},
    }
    file.write_text(json.dumps(spec))


class Chaos:
    """Deals the blows one after another, evenly over the sweep, and tends the fleet until the sweep ends."""

    def __init__(self, url: str, fleet: Fleet, blows: list[str]) -> None:
        self._url, self._fleet = url, fleet
        self._database = Database(url)
        self._dice = random.Random(5)
        self._blows = list(blows)
        self._dice.shuffle(self._blows)
        self._every = (_POINTS - 10) // len(blows)
        self.follower: Follower | None = None

    def run(self) -> str:
        """The sweep's id, when it has ended or paused and a client of the API knows that it has."""
        dealt = 0
        deadline = time.monotonic() + _ALLOWANCE_S
        while time.monotonic() < deadline:
            self._fleet.tend()
            time.sleep(0.05)
            try:
                found = self._look()
            except RuleError:  # the database is restarting
                continue
            if found is None:
                continue
            sweep_id, state, ended = found
            if self.follower is None:
                self.follower = Follower(self._fleet.address, sweep_id)
                self.follower.start()
            if state is SweepState.PAUSED or (state in SWEEP_TERMINAL and self.follower.ended.is_set()):
                break
            if dealt < len(self._blows) and ended >= (dealt + 1) * self._every:
                dealt += self._deal(self._blows[dealt])
        self._database.close()
        assert dealt == len(self._blows), f"only {dealt} of {self._blows} were dealt"
        return sweep_id

    def _look(self) -> tuple[str, SweepState, int] | None:
        with self._database.reading() as session:
            sweeps = SweepRepository(session).page().items
            if not sweeps:
                return None
            (sweep,) = sweeps
            counts = SweepRepository(session).counts(sweep.id)
        ended = sum(number for name, number in counts.items() if TrialState(name) in TERMINAL)
        return sweep.id, SweepState(sweep.state), ended

    def _deal(self, blow: str) -> bool:
        if blow == "database":
            self._fleet.shaken()
            shake(self._url)
            self._fleet.shaken()
            return True
        if blow == "node":
            lose_a_node()
            return True
        victims = sorted(self._fleet.victims(blow), key=lambda process: process.pid)
        if not victims:
            return False
        self._dice.choice(victims).kill()
        return True


def shake(url: str) -> None:
    """Crash the server and start it again; where it is not ours, throw everybody out; lock a file for a while."""
    if url.startswith("sqlite"):
        with sqlite3.connect(str(make_url(url).database), isolation_level=None, timeout=60) as connection:
            connection.execute("BEGIN IMMEDIATE")
            time.sleep(_LOCKED_S)
            connection.execute("ROLLBACK")
        connection.close()
    elif not postgres.restart():
        postgres.throw_out(url)


def check_everything(database: Database, sweep_id: str, log: Path, heard: list[int]) -> None:
    """No finished trial lost or done twice, each odd one with its reason, and the API's client missed nothing."""
    with database.reading() as session:
        sweep = SweepRepository(session).get(sweep_id)
        trials = TrialRepository(session).of_sweep(sweep_id)
        attempts = {t.id: TrialRepository(session).attempts(t.id) for t in trials}
        events = list(EventRepository(session).after(sweep_id=sweep_id, limit=100_000))
        frame = SampleRepository(session).frame(sweep_id=sweep_id)
    failed = [(t.config_json["point"], t.reason_kind, t.reason) for t in trials if t.state == "failed"]
    assert (sweep.state, sweep.reason) == ("succeeded", None), failed
    assert len(trials) == _POINTS
    launches = Counter(int(line) for line in log.read_text().split())
    rows = Counter(frame["trial_id"])
    for trial in trials:
        point = trial.config_json["point"]
        state, kind, said = chaos.ODD.get(point, ("succeeded", None, ""))
        assert (trial.state, trial.reason_kind) == (state, kind), (point, trial.reason)
        assert said in (trial.reason or "")
        *lost, last = attempts[trial.id]
        assert last.outcome == state
        assert {a.outcome for a in lost} <= {"lost"}
        assert all(a.reason for a in lost)
        assert 1 <= launches[point] <= len(attempts[trial.id])
        assert rows[trial.id] == (_RANKS * _REPEATS if state == "succeeded" else 0)
        path = [e.kind.removeprefix("trial.") for e in events if e.trial_id == trial.id]
        ends = [i for i, name in enumerate(path) if name in {s.value for s in TERMINAL}]
        assert ends == [len(path) - 1], path
    assert any(a.outcome == "lost" for each in attempts.values() for a in each)
    assert heard == [e.id for e in events]


def chaos_at(url: str, where: str, folder: Path, blows: list[str]) -> None:
    database = Database(url)
    database.migrate()
    log, file, scratch = folder / "log", folder / "sweep.json", folder / "scratch"
    log.touch()
    scratch.mkdir()
    write_sweep(file, log)
    fleet = Fleet(url, where, file, scratch)
    chaos_run = Chaos(url, fleet, blows)
    try:
        sweep_id = chaos_run.run()
        told = httpx.get(f"{fleet.address}/v1/sweeps/{sweep_id}", timeout=30).json()
        codes = fleet.end()
    finally:
        fleet.kill()
        if chaos_run.follower is not None:
            chaos_run.follower.leave()
    assert chaos_run.follower is not None
    check_everything(database, sweep_id, log, chaos_run.follower.heard)
    assert told["state"] == "succeeded"
    assert sum(told["trials"].values()) == _POINTS
    database.close()
    # whoever has only just been started again leaves before it can leave in order
    assert set(codes) <= {0, -signal.SIGKILL, -signal.SIGTERM}
    _, alive = psutil.wait_procs(fleet.left(), timeout=20)
    assert alive == []


def nobody_holds(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders that are left have no owner: the next worker of the machine removes them."""
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    left = list(scratch.glob("flatpeak-*"))
    for path in left:
        os.utime(path, (0, 0))
    assert sorted(abandoned()) == sorted(left)


def at_sqlite(folder: Path) -> str:
    return f"sqlite:///{folder / 'flatpeak.db'}"


def test_a_sweep_survives_on_sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chaos_at(at_sqlite(tmp_path), "local", tmp_path, BLOWS)
    nobody_holds(tmp_path / "scratch", monkeypatch)


@pytest.mark.postgres
def test_a_sweep_survives_on_postgresql(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = postgres.new_database()
    chaos_at(url, "local", tmp_path, BLOWS)
    nobody_holds(tmp_path / "scratch", monkeypatch)
    postgres.drop_database(url)


def test_a_sweep_survives_on_a_ray_cluster_and_sqlite(tmp_path: Path) -> None:
    chaos_on_ray(at_sqlite(tmp_path), tmp_path)


@pytest.mark.postgres
def test_a_sweep_survives_on_a_ray_cluster_and_postgresql(tmp_path: Path) -> None:
    url = postgres.new_database()
    chaos_on_ray(url, tmp_path)
    postgres.drop_database(url)


def chaos_on_ray(url: str, folder: Path) -> None:
    from tuner.executors.ray import RayExecutor

    ray_address = cluster().address
    chaos_at(url, ray_address, folder, RAY_BLOWS)
    assert emptied(agents)
    executor = RayExecutor(ray_address)
    assert emptied(placement_groups)
    executor.close()


def emptied(what: Callable[[], list[Any]]) -> bool:
    deadline = time.monotonic() + 20
    while what() and time.monotonic() < deadline:
        time.sleep(0.1)
    return not what()
