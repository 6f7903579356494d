"""Eight workers, 2,000 trials, one database: none lost, none done twice, no refusal for a lock; some workers die."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from collections import Counter
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from db.repositories import EventRepository, SampleRepository, SweepRepository, TrialRepository
from db.session import Database
from tests.postgres import drop_database, new_database
from tests.tuner import chaos_adapter as chaos
from tests.tuner.in_process import InProcessExecutor
from tuner.sweeping.sweep import create_sweep, parse_sweep
from tuner.sweeping.trial import Leases
from tuner.sweeping.worker import Worker

WORKERS, TRIALS, DEATHS, REPEATS = 8, 2000, 4, 3
LEASES = Leases(lease_s=60.0, heartbeat_s=0.05)


def work(url: str, sweep_id: str, last: int | None) -> None:
    """Until the sweep has ended, or in the middle of a trial after ``last``."""

    def die(done: int) -> None:
        if done == last:
            os.kill(os.getpid(), signal.SIGKILL)

    database = Database(url)
    Worker(database, lambda: InProcessExecutor(die), sweep_id=sweep_id, leases=LEASES).run(lambda: False)
    database.close()


def run_all(url: str, sweep_id: str) -> list[int]:
    """Exit codes of all workers; one that was killed is started again."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.tuner.test_many_trials", "torch._dynamo"])

    def start(last: int | None) -> Any:
        process = context.Process(target=work, args=(url, sweep_id, last))
        process.start()
        return process

    running = [start(20 + 5 * i if i < DEATHS else None) for i in range(WORKERS)]
    codes = []
    while running:
        wait([process.sentinel for process in running])
        for process in [p for p in running if not p.is_alive()]:
            process.join()
            codes.append(process.exitcode)
            running.remove(process)
            if process.exitcode == -signal.SIGKILL:
                running.append(start(None))
    return codes


# half a minute on an idle machine
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def test_two_thousand_trials_among_eight_workers(kind: str, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'flatpeak.db'}" if kind == "sqlite" else new_database()
    database = Database(url)
    database.migrate()
    (tmp_path / "log").touch()
    spec = {
        "operator": chaos.NAME,
        "target": {"ranks": 1},
        "shape": {"log": str(tmp_path / "log"), "pause_ms": 1},
        "space": {"point": list(range(TRIALS // 2)), "round": [0, 1]},
        "repeats": REPEATS,
        "max_trials": TRIALS,
    }
    sweep_id = create_sweep(database, parse_sweep(spec))
    began = time.monotonic()
    codes = Counter(run_all(url, sweep_id))
    print(f"{TRIALS} trials in {time.monotonic() - began:.1f} s")
    assert codes == {0: WORKERS, -signal.SIGKILL: DEATHS}
    with database.reading() as session:
        assert SweepRepository(session).get(sweep_id).state == "succeeded"
        trials = TrialRepository(session).of_sweep(sweep_id)
        attempts = [a for t in trials for a in TrialRepository(session).attempts(t.id)]
        frame = SampleRepository(session).frame(sweep_id=sweep_id)
        events = Counter(
            (e.trial_id, e.kind) for e in EventRepository(session).after(sweep_id=sweep_id, limit=100_000)
        )
    database.close()
    assert Counter(t.state for t in trials) == {"succeeded": TRIALS}
    assert Counter(a.outcome for a in attempts) == {"succeeded": TRIALS, "lost": DEATHS}
    assert len({a.worker for a in attempts}) == WORKERS + DEATHS
    launches = Counter(int(line) for line in (tmp_path / "log").read_text().split())
    assert launches == dict.fromkeys(range(TRIALS // 2), 2)
    assert Counter(frame["trial_id"]) == {t.id: REPEATS for t in trials}
    assert all(events[t.id, "trial.succeeded"] == 1 for t in trials)
    assert events[None, "sweep.running"] == events[None, "sweep.succeeded"] == 1
    if kind == "postgresql":
        drop_database(url)
