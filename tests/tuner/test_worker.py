"""Workers: any queued sweep, a clean leave, dead neighbours noticed, SIGTERM obeyed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from cost_model.errors import RuleError
from db.lifecycle import TrialState
from db.repositories import EventRepository, SweepRepository, TrialRepository
from db.session import Database
from tests.tuner.conftest import ToySpec
from tests.tuner.in_process import InProcessExecutor
from tuner.executors.base import GangOutcome, GangTask, Progress
from tuner.executors.local import LocalExecutor
from tuner.sweeping.sweep import SweepProgress, create_sweep, run_sweep, spec_of
from tuner.sweeping.trial import Leases, run_trial
from tuner.sweeping.worker import Worker, is_dead, worker_name

QUICK = Leases(lease_s=30.0, heartbeat_s=0.2)


def states(database: Database, sweep_id: str) -> tuple[str, dict[str, int]]:
    with database.reading() as session:
        sweeps = SweepRepository(session)
        return sweeps.get(sweep_id).state, sweeps.counts(sweep_id)


def test_a_worker_takes_the_trials_of_every_queued_sweep_it_can_run(
    database: Database, executor: LocalExecutor, toy_spec: ToySpec
) -> None:
    mine = [create_sweep(database, toy_spec([1, 2], ["ok"])) for _ in range(2)]
    other = create_sweep(database, toy_spec([1], ["ok"], target={"ranks": 2, "hardware_id": "elsewhere"}))
    wide = create_sweep(database, toy_spec([1], ["ok"], target={"ranks": 65}))
    done = threading.Event()

    def end_when_idle(progress: SweepProgress) -> None:
        if all(states(database, one)[0] == "succeeded" for one in mine):
            done.set()

    Worker(database, lambda: executor, leases=QUICK, progress=end_when_idle).run(done)
    for one in mine:
        assert states(database, one) == ("succeeded", {"succeeded": 2})
    assert states(database, other) == states(database, wide) == ("queued", {"queued": 1})


@pytest.mark.parametrize("strategy", ["grid", "tpe"])
def test_a_sweep_over_several_nodes_waits_for_a_cluster(
    database: Database, executor: LocalExecutor, toy_spec: ToySpec, strategy: str
) -> None:
    wide = create_sweep(
        database, toy_spec([1, 2], ["ok"], strategy=strategy, target={"ranks": 2, "nodes": 2})
    )
    mine = create_sweep(database, toy_spec([1], ["ok"]))
    worker = Worker(database, lambda: executor, leases=QUICK)
    worker.run(lambda: not worker.may_work())
    assert states(database, mine) == ("succeeded", {"succeeded": 1})
    assert states(database, wide) == ("queued", {"queued": 2} if strategy == "grid" else {})
    with pytest.raises(RuleError, match="must fit the machine") as refused:
        run_sweep(database, wide, executor)
    assert "one node" in refused.value.remedy
    assert "2 nodes" in str(refused.value.value)


def test_a_gang_that_finds_no_room_is_no_answer(
    database: Database, executor: LocalExecutor, toy_spec: ToySpec
) -> None:
    sweep_id = create_sweep(database, toy_spec([1], ["ok"], target={"ranks": 2, "nodes": 2}))
    with database.session() as session:
        sweep = SweepRepository(session).get(sweep_id)
        claim = TrialRepository(session).claim(worker_name())
    assert claim is not None
    # room that was there when the trial was claimed may be gone
    assert run_trial(database, claim, spec_of(sweep), executor) is TrialState.QUEUED
    assert states(database, sweep_id) == ("queued", {"queued": 1})


class FullExecutor(InProcessExecutor):
    """Has no room for gangs of the other provider, so many times."""

    def __init__(self, times: int) -> None:
        super().__init__(lambda done: None)
        self.times, self.tried = times, list[str]()

    def run(
        self,
        task: GangTask,
        *,
        on_progress: Progress | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> GangOutcome:
        provider = str(task.payload["provider"])
        self.tried.append(provider)
        if provider == "other" and self.tried.count("other") <= self.times:
            return GangOutcome("unplaced", reason="the cluster is full")
        return super().run(task, on_progress=on_progress, cancelled=cancelled)


def test_a_sweep_without_room_is_tried_again_ever_later_and_stops_no_other(
    database: Database, toy_spec: ToySpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_rank = {"ranks": 1}
    full = create_sweep(database, toy_spec([1], ["ok"], target=one_rank, provider="other"))
    mine = create_sweep(database, toy_spec([1, 2], ["ok"], target=one_rank))
    executor = FullExecutor(times=4)
    monkeypatch.setattr("tuner.sweeping.worker._NO_ROOM_S", 3600.0)
    monkeypatch.setattr("tuner.sweeping.worker._NO_ROOM_MOST_S", 3600.0)
    worker = Worker(database, lambda: executor, leases=QUICK)
    worker.run(lambda: states(database, mine)[0] == "succeeded")
    assert executor.tried == ["other", "flatpeak", "flatpeak"]
    assert states(database, full) == ("running", {"queued": 1})
    monkeypatch.setattr("tuner.sweeping.worker._NO_ROOM_S", 0.01)
    worker = Worker(database, lambda: executor, leases=QUICK)
    pauses: list[float] = []

    def idle() -> bool:
        pauses.extend(pause for pause, _ in worker._no_room.values() if pause not in pauses)
        return not worker.may_work()

    worker.run(idle)
    assert executor.tried[3:] == ["other"] * 4
    assert pauses == [0.01, 0.02, 0.04]
    assert states(database, full) == ("succeeded", {"succeeded": 1})
    with database.reading() as session:
        (trial,) = TrialRepository(session).of_sweep(full)
    assert trial.losses == 0


def test_a_sweep_that_cannot_be_read_here_is_left_to_others(
    database: Database,
    executor: LocalExecutor,
    toy_spec: ToySpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "rare_operator.py").write_text("from tests.tuner.toy import ADAPTER\n")
    with monkeypatch.context() as there:
        there.syspath_prepend(tmp_path / "elsewhere")
        foreign = create_sweep(database, toy_spec([1], ["ok"], operator="rare_operator:ADAPTER"))
    sys.modules.pop("rare_operator")
    newer = create_sweep(database, toy_spec([1], ["ok"]))
    with database.session() as session:
        sweep = SweepRepository(session).get(newer)
        sweep.spec_json = {**sweep.spec_json, "a_key_of_the_next_release": 1}
    mine = create_sweep(database, toy_spec([1], ["ok"]))
    said: list[SweepProgress] = []
    worker = Worker(database, lambda: executor, leases=QUICK, progress=said.append)
    worker.run(lambda: not worker.may_work())
    assert states(database, mine) == ("succeeded", {"succeeded": 1})
    assert states(database, foreign) == states(database, newer) == ("queued", {"queued": 1})
    skipped = {p.sweep_id: p.phase["reason"] for p in said if p.phase and p.phase["phase"] == "skipped"}
    assert "rare_operator" in skipped[foreign]
    assert "a_key_of_the_next_release" in skipped[newer]
    assert len([record for record in caplog.records if "left to other workers" in record.message]) == 2
    for one, about in ((foreign, "importable"), (newer, "readable here")):
        with pytest.raises(RuleError, match=about):
            run_sweep(database, one, executor)


def test_an_executor_that_raises_costs_its_trial_alone(database: Database, toy_spec: ToySpec) -> None:
    one_rank = {"ranks": 1}
    bad = create_sweep(database, toy_spec([1], ["ok"], target=one_rank))
    good = create_sweep(database, toy_spec([1], ["ok"], target=one_rank))
    tried: list[int] = []

    def break_down(done: int) -> None:
        tried.append(done)
        if len(tried) <= 4:
            raise OSError("no more files")

    worker = Worker(database, lambda: InProcessExecutor(break_down), leases=QUICK)
    worker.run(lambda: not worker.may_work())
    assert states(database, good) == ("succeeded", {"succeeded": 1})
    assert states(database, bad) == ("failed", {"failed": 1})
    with database.reading() as session:
        (trial,) = TrialRepository(session).of_sweep(bad)
    assert (trial.reason_kind, trial.losses) == ("raised", 4)
    assert "no more files" in (trial.reason or "")


def test_a_worker_told_to_stop_gives_its_trial_back(
    database: Database, executor: LocalExecutor, toy_spec: ToySpec
) -> None:
    sweep_id = create_sweep(database, toy_spec([1], ["hang"]))
    stop = threading.Event()

    def stop_once_running(progress: SweepProgress) -> None:
        if progress.phase and progress.phase["phase"] == "build":
            stop.set()

    Worker(database, lambda: executor, leases=QUICK, progress=stop_once_running).run(stop)
    with database.reading() as session:
        (trial,) = TrialRepository(session).of_sweep(sweep_id)
        attempts = TrialRepository(session).attempts(trial.id)
    assert (trial.state, trial.losses, trial.claim_id) == ("queued", 0, None)
    assert [(a.outcome, a.reason_kind) for a in attempts] == [("lost", "released")]


def test_trials_of_a_dead_worker_of_this_machine_come_back_at_once(
    database: Database, executor: LocalExecutor, toy_spec: ToySpec
) -> None:
    sweep_id = create_sweep(database, toy_spec([1], ["ok"]))
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    machine = worker_name().split("/")[0]
    with database.session() as session:
        assert TrialRepository(session).claim(f"{machine}/{child.pid}/123", lease_s=3600)
    Worker(database, lambda: executor, sweep_id=sweep_id, leases=QUICK).run(lambda: False)
    assert states(database, sweep_id) == ("succeeded", {"succeeded": 1})
    with database.reading() as session:
        kinds = [e.kind for e in EventRepository(session).after(sweep_id=sweep_id)]
    assert kinds.index("trial.lost") < kinds.index("trial.succeeded")


def test_only_what_is_certain_is_called_dead() -> None:
    machine, pid, born = worker_name().split("/")
    assert not is_dead(worker_name())
    assert is_dead(f"{machine}/{pid}/{int(born) - 1}")
    assert not is_dead(f"another-machine/{pid}/1")
    assert not is_dead("a name of another form")


_WORKER = """
import signal, sys, threading
from db.session import Database
from tuner.executors.local import LocalExecutor
from tuner.sweeping.worker import Worker
if __name__ == "__main__":
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    worker = Worker(Database(sys.argv[1]), LocalExecutor)
    worker.run(stop)
    worker.close()
"""


def test_a_trial_on_a_machine_that_was_frozen_is_not_called_stalled(
    database: Database, toy_spec: ToySpec, tmp_path: Path, log: Path
) -> None:
    timers = {"stall_s": 2, "cancel_s": 1}
    sweep_id = create_sweep(database, toy_spec([1], ["ok"], pause_ms=200, repeats=8, timers=timers))
    script = tmp_path / "worker.py"
    script.write_text(_WORKER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([".", *sys.path])}
    url = f"sqlite:///{tmp_path / 'flatpeak.db'}"
    process = subprocess.Popen([sys.executable, str(script), url], env=environment)
    try:
        deadline = time.monotonic() + 120
        while not log.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        frozen = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for one in frozen:
            one.suspend()
        time.sleep(3.0)
        for one in frozen:
            one.resume()
        while states(database, sweep_id)[1] == {"running": 1} and time.monotonic() < deadline:
            time.sleep(0.1)
        process.terminate()
        process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
    with database.reading() as session:
        (trial,) = TrialRepository(session).of_sweep(sweep_id)
        attempts = TrialRepository(session).attempts(trial.id)
    assert (trial.state, trial.reason, len(attempts)) == ("succeeded", None, 1)


@pytest.mark.parametrize("blow", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_of_a_worker_outlives_it(
    database: Database, toy_spec: ToySpec, tmp_path: Path, log: Path, blow: signal.Signals
) -> None:
    sweep_id = create_sweep(database, toy_spec([1], ["hang"]))
    script = tmp_path / "worker.py"
    script.write_text(_WORKER)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([".", *sys.path]), "TMPDIR": str(scratch)}
    url = f"sqlite:///{tmp_path / 'flatpeak.db'}"
    process = subprocess.Popen([sys.executable, str(script), url], env=environment)
    try:
        deadline = time.monotonic() + 120
        while not log.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(blow)
        code = process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert len(children) >= 2
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []
    assert list(scratch.glob("flatpeak-*")) == []
    _, counts = states(database, sweep_id)
    assert (code, counts) == ((0, {"queued": 1}) if blow == signal.SIGTERM else (-9, {"running": 1}))
