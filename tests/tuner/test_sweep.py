"""Sweeps end to end on real ranks: rows, rejection, odd trials, the breaker, cancel, resume after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from cost_model.errors import RuleError
from db.lifecycle import SweepState
from db.repositories import EventRepository, SampleRepository, SweepRepository, TrialRepository
from db.session import Database
from db.tables import Trial
from tests.tuner import toy
from tests.tuner.conftest import ToySpec
from tuner.executors.local import LocalExecutor
from tuner.machine.fingerprint import local_hardware_id
from tuner.sweeping.sweep import SweepProgress, create_sweep, parse_sweep, read_sweep_file, run_sweep
from tuner.sweeping.trial import Leases

QUICK = Leases(lease_s=30.0, heartbeat_s=0.2)


def trials_of(database: Database, sweep_id: str) -> dict[str, Trial]:
    """Trials by what they do, as ``n act``."""
    with database.reading() as session:
        trials = TrialRepository(session).of_sweep(sweep_id)
    return {f"{t.config_json['n']} {t.config_json['act']}": t for t in trials}


def launches(log: Path) -> Counter[str]:
    return Counter(log.read_text().splitlines())


def test_a_grid_sweep_leaves_a_row_for_every_rank_pass_and_repeat(
    database: Database, executor: LocalExecutor, toy_spec: ToySpec, log: Path
) -> None:
    sweep_id = create_sweep(database, toy_spec([2, 1, 3], ["ok"], repeats=4))
    seen: list[SweepProgress] = []
    outcome = run_sweep(database, sweep_id, executor, seen.append)
    assert (outcome.state, outcome.counts) == (SweepState.SUCCEEDED, {"succeeded": 3})
    assert launches(log) == {"1 ok": 1, "2 ok": 1, "3 ok": 1}
    with database.reading() as session:
        frame = SampleRepository(session).frame(sweep_id=sweep_id)
        kinds = Counter(e.kind for e in EventRepository(session).after(sweep_id=sweep_id))
    assert len(frame) == 3 * 2 * 4
    assert set(frame["hardware_id"]) == {local_hardware_id("cpu")}
    assert set(frame["operator_version"]) == {7}
    assert set(frame["peak_source"]) == {"tracked"}
    assert kinds["trial.succeeded"] == kinds["trial.running"] == 3
    assert kinds["sweep.succeeded"] == kinds["sweep.running"] == 1
    first = trials_of(database, sweep_id)["1 ok"]
    assert first.result_json is not None
    assert first.latency_s == first.result_json["fast_s"]
    assert first.peak_bytes is not None
    assert toy.MIB <= first.peak_bytes <= (first.bound_bytes or 0)
    assert first.bound_terms_json == {"rows": toy.MIB, "fixed": toy.MIB}
    assert seen[-1].ended == seen[-1].total == 3
    assert seen[-1].best_latency_s == min(t.latency_s or 9 for t in trials_of(database, sweep_id).values())
    assert {"repeat", "warm-up"} <= {p.phase["phase"] for p in seen if p.phase}


def test_what_cannot_fit_is_never_launched(
    database: Database, executor: LocalExecutor, toy_spec: ToySpec, log: Path
) -> None:
    sweep_id = create_sweep(database, toy_spec([1, 2, 5], ["ok"], memory_limit_bytes=3 * toy.MIB))
    big = trials_of(database, sweep_id)["5 ok"]
    assert (big.state, big.reason_kind) == ("infeasible", "bound")
    assert "Eq. 6" in (big.reason or "")
    assert run_sweep(database, sweep_id, executor).counts == {"succeeded": 2, "infeasible": 1}
    assert launches(log) == {"1 ok": 1, "2 ok": 1}
    with database.reading() as session:
        assert TrialRepository(session).attempts(big.id) == []


def test_odd_trials_keep_their_reason_and_the_next_one_runs(
    database: Database, executor: LocalExecutor, toy_spec: ToySpec
) -> None:
    sweep_id = create_sweep(database, toy_spec([1], ["oom", "raise", "ok", "wrong"]))
    outcome = run_sweep(database, sweep_id, executor)
    assert outcome.state is SweepState.SUCCEEDED
    found = {name: (t.state, t.reason_kind) for name, t in trials_of(database, sweep_id).items()}
    assert found == {
        "1 oom": ("infeasible", "host_oom"),
        "1 raise": ("failed", "raised"),
        "1 ok": ("succeeded", None),
        "1 wrong": ("failed", "wrong"),
    }
    trials = trials_of(database, sweep_id)
    assert "the toy is broken" in (trials["1 raise"].reason or "")
    assert "reference" in (trials["1 wrong"].reason or "")
    assert trials["1 wrong"].latency_s is None
    with database.reading() as session:
        (attempt,) = TrialRepository(session).attempts(trials["1 raise"].id)
    assert "the toy is broken" in (attempt.log_tail or "")
    assert attempt.hardware_id == local_hardware_id("cpu")
    assert attempt.software_json is not None
    assert attempt.software_json["torch"]


@pytest.mark.parametrize(("act", "said"), [("idle", "at least one pass"), ("vague", "tolerance")])
def test_answers_that_cannot_be_used_fail_their_trial(
    database: Database, executor: LocalExecutor, toy_spec: ToySpec, act: str, said: str
) -> None:
    sweep_id = create_sweep(database, toy_spec([1], [act, "ok"]))
    outcome = run_sweep(database, sweep_id, executor)
    assert outcome.counts == {"failed": 1, "succeeded": 1}
    odd = trials_of(database, sweep_id)[f"1 {act}"]
    assert (odd.reason_kind, odd.latency_s, odd.result_json) == ("raised", None, None)
    assert said in (odd.reason or "")


def test_three_failures_within_a_minute_pause_the_sweep(
    database: Database, executor: LocalExecutor, toy_spec: ToySpec
) -> None:
    spec = toy_spec([1], ["raise", "kill", "hang", "ok"], timers={"stall_s": 5, "cancel_s": 1})
    sweep_id = create_sweep(database, spec)
    outcome = run_sweep(database, sweep_id, executor)
    assert outcome.state is SweepState.PAUSED
    assert "3 trials failed within 60 s" in (outcome.reason or "")
    found = {name: (t.state, t.reason_kind) for name, t in trials_of(database, sweep_id).items()}
    assert found == {
        "1 raise": ("failed", "raised"),
        "1 kill": ("failed", "died"),
        "1 hang": ("failed", "stalled"),
        "1 ok": ("queued", None),
    }
    killed = trials_of(database, sweep_id)["1 kill"]
    assert "lost 4 times; the last time rank 1: its process was killed by SIGKILL" in (killed.reason or "")
    with database.session() as session:
        SweepRepository(session).resume(sweep_id)
    assert run_sweep(database, sweep_id, executor).counts == {"failed": 3, "succeeded": 1}


def test_cancel_stops_a_running_trial(database: Database, executor: LocalExecutor, toy_spec: ToySpec) -> None:
    sweep_id = create_sweep(database, toy_spec([1, 2], ["hang"]))

    def cancel_once_running(progress: SweepProgress) -> None:
        if progress.phase and progress.phase["phase"] == "build":
            with database.session() as session:
                SweepRepository(session).cancel(sweep_id)

    outcome = run_sweep(database, sweep_id, executor, cancel_once_running, leases=QUICK)
    assert outcome.state is SweepState.CANCELLED
    assert outcome.counts == {"cancelled": 2}


def test_a_trial_taken_away_meanwhile_is_not_written(
    database: Database, executor: LocalExecutor, toy_spec: ToySpec, log: Path
) -> None:
    sweep_id = create_sweep(database, toy_spec([1], ["ok"], pause_ms=50))
    taken: list[str] = []

    def take_away(progress: SweepProgress) -> None:
        if not taken and progress.phase and progress.phase["phase"] == "build":
            with database.session() as session:
                trials = TrialRepository(session)
                (attempt,) = trials.live_attempts()
                taken.append(attempt.claim_id)
                trials.abandon(attempt.claim_id, "a test took it away")

    outcome = run_sweep(database, sweep_id, executor, take_away, leases=replace(QUICK, heartbeat_s=0.05))
    assert outcome.counts == {"succeeded": 1}
    assert launches(log) == {"1 ok": 2}
    (trial,) = trials_of(database, sweep_id).values()
    with database.reading() as session:
        attempts = TrialRepository(session).attempts(trial.id)
        frame = SampleRepository(session).frame(sweep_id=sweep_id)
    assert [a.outcome for a in attempts] == ["lost", "succeeded"]
    assert len(frame) == 2 * 3


_CONTROLLER = """
import sys
from db.session import Database
from tuner.executors.local import LocalExecutor
from tuner.sweeping.sweep import run_sweep
if __name__ == "__main__":
    run_sweep(Database(sys.argv[1]), sys.argv[2], LocalExecutor())
"""


def test_a_killed_controller_is_resumed_without_repeating_a_finished_trial(
    database: Database, executor: LocalExecutor, toy_spec: ToySpec, log: Path, tmp_path: Path
) -> None:
    sweep_id = create_sweep(database, toy_spec([1, 2, 3, 4, 5], ["ok"], pause_ms=30))
    script = tmp_path / "controller.py"
    script.write_text(_CONTROLLER)
    url = f"sqlite:///{tmp_path / 'flatpeak.db'}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([".", *sys.path])}
    controller = subprocess.Popen([sys.executable, str(script), url, sweep_id], env=environment)
    try:
        deadline = time.monotonic() + 120
        while len(launches(log)) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        children = psutil.Process(controller.pid).children(recursive=True)
    finally:
        controller.send_signal(signal.SIGKILL)
        controller.wait()
    states = Counter(t.state for t in trials_of(database, sweep_id).values())
    assert states["succeeded"] >= 2
    finished = {name for name, t in trials_of(database, sweep_id).items() if t.state == "succeeded"}
    assert len(finished) < 5
    before = launches(log)
    outcome = run_sweep(database, sweep_id, executor)
    assert outcome.counts == {"succeeded": 5}
    after = launches(log)
    assert all(after[name] == before[name] == 1 for name in finished)
    with database.reading() as session:
        frame = SampleRepository(session).frame(sweep_id=sweep_id)
    assert len(frame) == 5 * 2 * 3
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []


@pytest.mark.parametrize("strategy", ["random", "tpe", "gp"])
def test_a_strategy_measures_distinct_points_up_to_max_trials(
    database: Database, executor: LocalExecutor, toy_spec: ToySpec, log: Path, strategy: str
) -> None:
    spec = toy_spec(
        [1, 2, 3, 4, 5, 9], ["ok"], strategy=strategy, max_trials=4, memory_limit_bytes=7 * toy.MIB
    )
    sweep_id = create_sweep(database, spec)
    outcome = run_sweep(database, sweep_id, executor)
    assert outcome.state is SweepState.SUCCEEDED
    assert outcome.counts["succeeded"] >= 3
    assert outcome.counts["succeeded"] <= 4
    assert "9 ok" not in launches(log)
    assert set(launches(log).values()) == {1}
    assert all(t.proposed_by == strategy for t in trials_of(database, sweep_id).values())


def test_an_adaptive_sweep_ends_when_its_space_does(
    database: Database, executor: LocalExecutor, toy_spec: ToySpec
) -> None:
    sweep_id = create_sweep(database, toy_spec([1, 2], ["ok"], strategy="tpe", max_trials=50))
    assert run_sweep(database, sweep_id, executor).counts == {"succeeded": 2}


@pytest.mark.parametrize("strategy", ["grid", "random", "tpe", "gp", "model"])
def test_where_nothing_fits_every_strategy_ends_alike_and_says_why(
    database: Database, executor: LocalExecutor, strategy: str
) -> None:
    spec = parse_sweep(
        {
            "operator": "ring_dtp",
            "target": {"ranks": 1},
            "shape": {"tokens_per_rank": 64, "hidden": 32, "vocab": 128},
            "space": {"ring_mode": ["weights"], "strip_rows": [16, 32, 64]},
            "strategy": strategy,
            "memory_limit_bytes": 1,
        }
    )
    outcome = run_sweep(database, create_sweep(database, spec), executor)
    assert outcome.state is SweepState.SUCCEEDED
    assert list(outcome.counts) == ["infeasible"]
    assert "no point could be launched" in (outcome.reason or "")
    assert "Eq. 6" in (outcome.reason or "")


@pytest.mark.parametrize("strategy", ["tpe", "gp"])
def test_a_large_space_without_a_point_that_fits_comes_to_an_end(
    database: Database, executor: LocalExecutor, toy_spec: ToySpec, strategy: str
) -> None:
    acts = ["ok", "raise", "kill", "hang", "oom", "wrong", "idle", "vague"]
    values = list(range(1, 1001))
    spec = toy_spec(values, acts, strategy=strategy, memory_limit_bytes=toy.MIB, max_trials=2)
    sweep_id = create_sweep(database, spec)
    outcome = run_sweep(database, sweep_id, executor)
    assert outcome.state is SweepState.SUCCEEDED
    assert outcome.counts["infeasible"] <= 64
    assert "no point could be launched" in (outcome.reason or "")


@pytest.mark.parametrize("strategy", ["tpe", "gp"])
def test_a_worker_is_asked_to_stop_between_proposals(
    database: Database, executor: LocalExecutor, toy_spec: ToySpec, strategy: str
) -> None:
    spec = toy_spec(list(range(2, 1002)), ["ok"], strategy=strategy, memory_limit_bytes=2 * toy.MIB)
    asked = iter(range(8))
    sweep_id = create_sweep(database, spec)
    outcome = run_sweep(database, sweep_id, executor, stop=lambda: next(asked, None) is None)
    assert outcome.state in (SweepState.QUEUED, SweepState.SUCCEEDED)
    assert len(trials_of(database, sweep_id)) <= 8


def test_many_spellings_of_few_points_are_few_points(database: Database, executor: LocalExecutor) -> None:
    """A host_share means nothing to the engine stream, and a bucket is no larger than the parameters."""
    spec = parse_sweep(
        {
            "operator": "stream_adamw",
            "target": {"ranks": 1},
            "shape": {"params": 1000},
            "space": {
                "engine": ["stream"],
                "bucket_params": list(range(1000, 2000)),
                "staging_slots": [2, 3],
                "host_share": [i / 1000 for i in range(1, 250)],
            },
            "strategy": "tpe",
            "max_trials": 50,
        }
    )
    outcome = run_sweep(database, create_sweep(database, spec), executor)
    assert (outcome.state, outcome.counts) == (SweepState.SUCCEEDED, {"succeeded": 2})


def test_an_idempotency_key_gives_the_same_sweep(database: Database, toy_spec: ToySpec) -> None:
    spec = toy_spec([1], ["ok"])
    first = create_sweep(database, spec, "key")
    assert create_sweep(database, spec, "key") == first
    assert create_sweep(database, spec) != first
    with pytest.raises(RuleError, match="one request"):
        create_sweep(database, toy_spec([2], ["ok"]), "key")


def test_a_sweep_of_other_hardware_is_refused(
    database: Database, executor: LocalExecutor, toy_spec: ToySpec
) -> None:
    spec = toy_spec([1], ["ok"], target={"ranks": 2, "hardware_id": "h200-x8-000000000000"})
    sweep_id = create_sweep(database, spec)
    with pytest.raises(RuleError, match="bound to one kind of hardware"):
        run_sweep(database, sweep_id, executor)


def test_a_sweep_larger_than_the_machine_is_refused(database: Database, toy_spec: ToySpec) -> None:
    sweep_id = create_sweep(database, toy_spec([1], ["ok"]))
    with pytest.raises(RuleError, match="must fit the machine"):
        run_sweep(database, sweep_id, LocalExecutor(max_cpu_ranks=1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"operator": "ring"}, "registry"),
        ({"provider": "nobody"}, "one of its providers"),
        ({"space": {"color": [1]}}, "own knobs"),
        ({"space": {"act": ["sing"]}}, "values of its list"),
        ({"space": {"n": ["many"]}}, "must be numbers"),
        ({"space": {"n": []}}, "must not be empty"),
        ({"shape": {}}, "needs log"),
        ({"max_trials": 1}, "max_trials = 1"),
        ({"repeats": 2}, "at least 3"),
        ({"target": {"ranks": 0}}, "target.ranks"),
        ({"strategy": "guess"}, "strategy"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_wrong_spec_is_named(
    database: Database, toy_spec: ToySpec, change: dict[str, object], said: str
) -> None:
    with pytest.raises(RuleError, match=said) as refused:
        create_sweep(database, toy_spec([1, 2], ["ok"], **change))
    assert refused.value.remedy
    with database.reading() as session:
        assert SweepRepository(session).page().items == []


def test_sweep_files_are_yaml_or_json(tmp_path: Path) -> None:
    data = {
        "operator": "ring_dtp",
        "target": {"ranks": 2},
        "shape": {"hidden": 8},
        "space": {"strip_rows": 4},
    }
    as_json, as_yaml = tmp_path / "s.json", tmp_path / "s.yaml"
    as_json.write_text(json.dumps(data))
    as_yaml.write_text("operator: ring_dtp\ntarget: {ranks: 2}\nshape: {hidden: 8}\nspace: {strip_rows: 4}\n")
    assert read_sweep_file(as_json) == read_sweep_file(as_yaml) == parse_sweep(data)
    assert parse_sweep(data).space == {"strip_rows": [4]}
    as_yaml.write_text("operator: [\n")
    for path, said in ((tmp_path / "none.yaml", "readable"), (as_yaml, "YAML or JSON")):
        with pytest.raises(RuleError, match=said):
            read_sweep_file(path)
    as_yaml.write_text("just text")
    with pytest.raises(RuleError, match="the sweep"):
        read_sweep_file(as_yaml)
