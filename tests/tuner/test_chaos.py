"""A sweep among three workers while ranks, workers, its controller and the database are killed at random."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from cost_model.errors import RuleError
from db.ids import new_id
from db.lifecycle import SWEEP_TERMINAL, TERMINAL, SweepState, TrialState
from db.repositories import EventRepository, SampleRepository, SweepRepository, TrialRepository
from db.session import Database
from tests import postgres
from tests.ray_cluster import agents, cluster, placement_groups
from tests.tuner import chaos_adapter as chaos
from tuner.sweep import create_sweep, parse_sweep

# half a minute on an idle machine: most of it is processes that start, again and again
pytestmark = [pytest.mark.timeout(600), pytest.mark.soak]

_MARK = "FLATPEAK_CHAOS"
_ALLOWANCE_S = 540.0
_REPEATS, _RANKS = 3, 2


class Fleet:
    """Two workers and the sweep's controller, which works too; each is started again when it ends."""

    def __init__(self, url: str, where: str, sweep_id: str) -> None:
        self.mark = new_id("chaos")
        script = [sys.executable, "-m", "tests.tuner.chaos_worker", url, where]
        self._commands = {"controller": [*script, sweep_id], "worker a": script, "worker b": script}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._where = where

    def tend(self) -> None:
        """Start who is missing, as a service manager would."""
        for name, command in self._commands.items():
            process = self._processes.get(name)
            ended = process is not None and process.poll() is not None
            if process is not None and ended:
                assert process.returncode in (0, -signal.SIGKILL), f"{name} ended by itself"
            if process is None or ended:
                environment = {**os.environ, _MARK: self.mark}
                self._processes[name] = subprocess.Popen(command, env=environment)

    def victims(self, kind: str) -> list[psutil.Process]:
        """Living processes of a kind: ``controller``, ``worker`` or ``rank``."""
        living = {n: psutil.Process(p.pid) for n, p in self._processes.items() if p.poll() is None}
        if kind == "rank":
            owners = list(living.values()) if self._where == "local" else agents()
            return [rank for owner in owners for rank in _ranks_of(owner)]
        return [process for name, process in living.items() if name.startswith(kind)]

    def end(self) -> list[int | None]:
        """Ask everybody to leave; their exit codes."""
        for process in self._processes.values():
            process.terminate()
        return [process.wait(timeout=60) for process in self._processes.values()]

    def kill(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def left(self) -> list[psutil.Process]:
        """Whoever still carries this fleet's mark."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == self.mark:
                    found.append(process)
            except psutil.Error:
                continue
        return found


def _ranks_of(owner: psutil.Process) -> list[psutil.Process]:
    """Children of the owner's fork server."""
    try:
        return [rank for child in owner.children() for rank in child.children()]
    except psutil.Error:
        return []


def chaos_sweep(database: Database, log: Path, points: int) -> str:
    spec = {
        "operator": chaos.NAME,
        "target": {"ranks": _RANKS},
        "shape": {"log": str(log), "pause_ms": 15},
        "space": {"point": list(range(points))},
        "repeats": _REPEATS,
        "memory_limit_bytes": chaos.LIMIT_BYTES,
        "timers": {"stall_s": 10, "cancel_s": 1},
    }
    return create_sweep(database, parse_sweep(spec))


def run_through(database: Database, sweep_id: str, fleet: Fleet, blows: list[str], points: int) -> None:
    """Deal the blows one after another, evenly over the sweep, and wait for its end."""
    dice = random.Random(5)
    dice.shuffle(blows)
    every = (points - 10) // len(blows)
    dealt = 0
    deadline = time.monotonic() + _ALLOWANCE_S
    while time.monotonic() < deadline:
        try:
            with database.reading() as session:
                state = SweepState(SweepRepository(session).get(sweep_id).state)
                counts = SweepRepository(session).counts(sweep_id)
        except RuleError:  # the database is restarting
            time.sleep(0.2)
            continue
        if state in SWEEP_TERMINAL or state is SweepState.PAUSED:
            break
        fleet.tend()
        ended = sum(number for name, number in counts.items() if TrialState(name) in TERMINAL)
        if dealt < len(blows) and ended >= (dealt + 1) * every and _deal(blows[dealt], fleet, dice):
            dealt += 1
        time.sleep(0.05)
    assert dealt == len(blows), f"only {dealt} of {blows} were dealt"


def _deal(blow: str, fleet: Fleet, dice: random.Random) -> bool:
    if blow == "database":
        return postgres.restart()
    victims = sorted(fleet.victims(blow), key=lambda process: process.pid)
    if not victims:
        return False
    dice.choice(victims).kill()
    return True


def check_everything(database: Database, sweep_id: str, log: Path, points: int) -> None:
    """No finished trial lost or done twice, and each odd one with its reason."""
    with database.reading() as session:
        sweep = SweepRepository(session).get(sweep_id)
        trials = TrialRepository(session).of_sweep(sweep_id)
        attempts = {t.id: TrialRepository(session).attempts(t.id) for t in trials}
        events = list(EventRepository(session).after(sweep_id=sweep_id, limit=100_000))
        frame = SampleRepository(session).frame(sweep_id=sweep_id)
    assert (sweep.state, sweep.reason) == ("succeeded", None)
    assert len(trials) == points
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "log").touch()
    return tmp_path


def chaos_at(url: str, where: str, folder: Path, blows: list[str], points: int) -> Fleet:
    database = Database(url)
    database.migrate()
    sweep_id = chaos_sweep(database, folder / "log", points)
    fleet = Fleet(url, where, sweep_id)
    try:
        run_through(database, sweep_id, fleet, blows, points)
        codes = fleet.end()
    finally:
        fleet.kill()
    check_everything(database, sweep_id, folder / "log", points)
    database.close()
    # whoever has only just been started again leaves before it can leave in order
    assert set(codes) <= {0, -signal.SIGKILL, -signal.SIGTERM}
    _, alive = psutil.wait_procs(fleet.left(), timeout=20)
    assert alive == []
    return fleet


BLOWS = ["rank", "rank", "rank", "worker", "worker", "controller"]


def test_a_sweep_survives_on_sqlite(folder: Path) -> None:
    chaos_at(f"sqlite:///{folder / 'flatpeak.db'}", "local", folder, list(BLOWS), 60)


@pytest.mark.postgres
def test_a_sweep_survives_on_postgresql(folder: Path) -> None:
    url = postgres.new_database()
    blows = list(BLOWS)
    if postgres.can_restart():
        blows.append("database")
    chaos_at(url, "local", folder, blows, 60)
    postgres.drop_database(url)


def test_a_sweep_survives_on_a_ray_cluster(folder: Path) -> None:
    from tuner.executors.ray import RayExecutor

    blows = ["rank", "rank", "worker", "controller"]
    ray_address = cluster().address
    chaos_at(f"sqlite:///{folder / 'flatpeak.db'}", ray_address, folder, blows, 40)
    assert emptied(agents)
    executor = RayExecutor(ray_address)
    assert emptied(placement_groups)
    executor.close()


def emptied(what: Callable[[], list[Any]]) -> bool:
    deadline = time.monotonic() + 20
    while what() and time.monotonic() < deadline:
        time.sleep(0.1)
    return not what()
