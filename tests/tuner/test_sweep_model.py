"""Sweeps by strategy model on real ranks: few trials, older rows used, hopeless points stopped after a repeat."""

from __future__ import annotations

from db.lifecycle import SweepState
from db.repositories import SampleRepository, TrialRepository
from db.session import Database
from db.tables import Trial
from tests.tuner.conftest import ToySpec
from tuner.executors.local import LocalExecutor
from tuner.proposals.samplers import Known
from tuner.sweeping.sweep import _known, create_sweep, parse_sweep, run_sweep

HEAD = {
    "operator": "ring_dtp",
    "target": {"ranks": 2},
    "shape": {"tokens_per_rank": 64, "hidden": 16, "vocab": 96},
    "space": {"ring_mode": ["weights", "activations"], "strip_rows": [1, 2, 8, 64]},
    "strategy": "model",
    "max_trials": 5,
}


def trials_of(database: Database, sweep_id: str) -> list[Trial]:
    with database.reading() as session:
        return TrialRepository(session).of_sweep(sweep_id)


def test_a_sweep_by_the_model_ends_and_the_next_one_starts_from_its_rows(
    database: Database, executor: LocalExecutor
) -> None:
    first = create_sweep(database, parse_sweep(HEAD))
    assert run_sweep(database, first, executor).state is SweepState.SUCCEEDED
    trials = trials_of(database, first)
    assert 0 < len(trials) <= 5
    assert {t.proposed_by for t in trials} == {"model"}
    assert {t.state for t in trials} <= {"succeeded", "pruned"}
    done = [t for t in trials if t.state == "succeeded"]
    best = min(done, key=lambda t: t.latency_s or 9.0)
    second = create_sweep(database, parse_sweep({**HEAD, "max_trials": 1, "seed": 1}))
    run_sweep(database, second, executor)
    [again] = trials_of(database, second)
    # a strip of one row is many times slower: whoever knows the older rows does not begin there
    assert again.config_json["strip_rows"] in {best.config_json["strip_rows"], 8, 64}
    assert again.state == "succeeded"


def test_the_model_launches_nothing_beyond_its_bound(database: Database, executor: LocalExecutor) -> None:
    bounds = sorted(
        t.bound_bytes or 0
        for t in trials_of(
            database, create_sweep(database, parse_sweep({**HEAD, "strategy": "grid", "max_trials": 8}))
        )
    )
    limit = bounds[len(bounds) // 2]
    sweep_id = create_sweep(database, parse_sweep({**HEAD, "memory_limit_bytes": limit}))
    run_sweep(database, sweep_id, executor)
    trials = trials_of(database, sweep_id)
    assert trials
    assert all((t.bound_bytes or 0) <= limit for t in trials)


def test_a_point_out_of_reach_is_pruned_after_one_repeat_and_keeps_its_rows(
    database: Database, executor: LocalExecutor, toy_spec: ToySpec
) -> None:
    # twelve times the time and the memory of the first point
    spec = toy_spec([1, 12], ["ok"], pause_ms=30, prune=True, repeats=4)
    sweep_id = create_sweep(database, spec)
    outcome = run_sweep(database, sweep_id, executor)
    assert (outcome.state, outcome.counts) == (SweepState.SUCCEEDED, {"succeeded": 1, "pruned": 1})
    fast, slow = sorted(trials_of(database, sweep_id), key=lambda t: t.config_json["n"])
    assert (fast.state, slow.state, slow.reason_kind) == ("succeeded", "pruned", "pruned")
    assert "out of reach" in (slow.reason or "")
    assert slow.latency_s is not None
    assert slow.latency_s > 5 * (fast.latency_s or 0.0)
    with database.reading() as session:
        repeats = {
            t.config_json["n"]: {s.repeat for s in SampleRepository(session).of_trial(t.id)}
            for t in (fast, slow)
        }
    assert repeats == {1: {0, 1, 2, 3}, 12: {0}}
    told = _known(slow)
    assert isinstance(told, Known)
    assert (told.failed, told.latency_s) == (False, slow.latency_s)


def test_an_exhaustive_sweep_prunes_nothing(
    database: Database, executor: LocalExecutor, toy_spec: ToySpec
) -> None:
    sweep_id = create_sweep(database, toy_spec([1, 12], ["ok"], pause_ms=5))
    assert run_sweep(database, sweep_id, executor).counts == {"succeeded": 2}
