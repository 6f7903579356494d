"""What the trial repository promises, on both databases."""

from __future__ import annotations

import pytest

from cost_model.errors import RuleError
from db.lifecycle import MAX_LOSSES, TrialState
from db.repositories import (
    ClaimLost,
    EventRepository,
    NewTrial,
    SampleRepository,
    SweepRepository,
    TrialRepository,
)
from db.repositories.samples import COLUMNS, NewSample
from db.repositories.trials import Claim
from db.session import Database


def make_sweep(database: Database, trials: int, *, ranks: int = 2, hardware_id: str | None = None) -> str:
    with database.session() as session:
        sweep = SweepRepository(session).create(
            name="t",
            operator="ring_dtp",
            provider="flatpeak",
            strategy="grid",
            ranks=ranks,
            device="cpu",
            spec={},
            max_trials=trials,
            hardware_id=hardware_id,
        )
        TrialRepository(session).add(sweep.id, [NewTrial({"n": i}, f"c{i}") for i in range(trials)])
        return sweep.id


def claim(database: Database, lease_s: float = 60.0) -> Claim | None:
    with database.session() as session:
        return TrialRepository(session).claim("worker", lease_s=lease_s)


def must_claim(database: Database, lease_s: float = 60.0) -> Claim:
    held = claim(database, lease_s)
    assert held is not None
    return held


def finish(database: Database, held: Claim, state: TrialState = TrialState.SUCCEEDED) -> None:
    with database.session() as session:
        TrialRepository(session).start(held)
    with database.session() as session:
        TrialRepository(session).finish(held, state, result={"x": 1.5}, latency_s=0.25, peak_bytes=2**40)


def reap(database: Database) -> list[str]:
    with database.session() as session:
        return TrialRepository(session).reap()


def state_of(database: Database, trial_id: str) -> str:
    with database.reading() as session:
        return TrialRepository(session).get(trial_id).state


def test_a_trial_is_claimed_once_and_keeps_its_answer(database: Database) -> None:
    make_sweep(database, 1)
    held = must_claim(database)
    assert claim(database) is None
    finish(database, held)
    with database.reading() as session:
        trial = TrialRepository(session).get(held.trial.id)
        assert (trial.state, trial.latency_s, trial.peak_bytes) == ("succeeded", 0.25, 2**40)
        assert trial.result_json == {"x": 1.5}
        (attempt,) = TrialRepository(session).attempts(trial.id)
        assert attempt.outcome == "succeeded"
        assert attempt.finished_at is not None
        kinds = [event.kind for event in EventRepository(session).after()]
    assert kinds == ["sweep.queued", "trial.placing", "trial.running", "trial.succeeded"]


def test_a_late_report_changes_nothing(database: Database) -> None:
    make_sweep(database, 1)
    first = must_claim(database, lease_s=-1)
    assert reap(database) == [first.trial.id]
    second = must_claim(database)
    with database.session() as session, pytest.raises(ClaimLost):
        TrialRepository(session).finish(first, TrialState.SUCCEEDED, latency_s=9.0)
    with database.session() as session:
        assert not TrialRepository(session).heartbeat(first.claim_id).alive
        assert TrialRepository(session).heartbeat(second.claim_id).alive
    finish(database, second)
    with database.session() as session, pytest.raises(ClaimLost):
        TrialRepository(session).finish(second, TrialState.FAILED)
    with database.reading() as session:
        attempts = TrialRepository(session).attempts(first.trial.id)
    assert [(a.number, a.outcome) for a in attempts] == [(0, "lost"), (1, "succeeded")]


def test_a_trial_lost_too_often_becomes_failed_with_its_reason(database: Database) -> None:
    make_sweep(database, 1)
    for _ in range(MAX_LOSSES + 1):
        held = must_claim(database, lease_s=-1)
        reap(database)
    assert claim(database) is None
    with database.reading() as session:
        trial = TrialRepository(session).get(held.trial.id)
    assert (trial.state, trial.reason_kind) == ("failed", "lost")
    assert "lease" in (trial.reason or "")


def test_a_released_trial_is_not_counted_as_lost(database: Database) -> None:
    make_sweep(database, 1)
    for _ in range(MAX_LOSSES + 3):
        held = must_claim(database)
        with database.session() as session:
            assert TrialRepository(session).release(held, "the worker was told to stop")
    assert state_of(database, held.trial.id) == "queued"


def test_heartbeat_extends_the_lease_on_the_database_clock(database: Database) -> None:
    make_sweep(database, 1)
    held = must_claim(database, lease_s=-1)
    with database.session() as session:
        assert TrialRepository(session).heartbeat(held.claim_id, lease_s=60).alive
    assert reap(database) == []


def test_cancel_ends_a_queued_trial_and_asks_a_live_one(database: Database) -> None:
    make_sweep(database, 2)
    held = must_claim(database)
    with database.reading() as session:
        other = next(
            t for t in TrialRepository(session).of_sweep(held.trial.sweep_id) if t.id != held.trial.id
        )
    with database.session() as session:
        trials = TrialRepository(session)
        assert trials.cancel(other.id)
        assert not trials.cancel(other.id)
        assert trials.cancel(held.trial.id)
    with database.session() as session:
        beat = TrialRepository(session).heartbeat(held.claim_id)
        assert (beat.alive, beat.cancel) == (True, True)
    # a worker that dies after being asked to stop does not bring the trial back
    with database.session() as session:
        assert TrialRepository(session).abandon(held.claim_id, "its worker died")
    assert state_of(database, held.trial.id) == "cancelled"


def test_points_are_held_once_and_rejected_ones_never_queued(database: Database) -> None:
    sweep_id = make_sweep(database, 2)
    with database.session() as session:
        added = TrialRepository(session).add(
            sweep_id,
            [
                NewTrial({"n": 1}, "c1"),
                NewTrial({"n": 7}, "c7", bound_bytes=10**13, rejected="bound over limit"),
            ],
        )
    assert [(t.number, t.config_id) for t in added] == [(2, "c7")]
    with database.reading() as session:
        trial = TrialRepository(session).get(added[0].id)
        assert (trial.state, trial.reason_kind, trial.bound_bytes) == ("infeasible", "bound", 10**13)
        assert TrialRepository(session).attempts(trial.id) == []


def test_a_worker_takes_trials_of_the_sweeps_it_names(database: Database) -> None:
    first, second = make_sweep(database, 1), make_sweep(database, 1)
    with database.session() as session:
        trials = TrialRepository(session)
        assert trials.claim("w", sweep_ids=[]) is None
        for wanted in (second, first):
            claim = trials.claim("w", sweep_ids=[wanted, "swp_none"])
            assert claim is not None
            assert claim.trial.sweep_id == wanted
        assert trials.claim("w") is None


def test_pause_resume_cancel_and_settle(database: Database) -> None:
    sweep_id = make_sweep(database, 3)
    with database.session() as session:
        assert SweepRepository(session).pause(sweep_id, "three failures")
    assert claim(database) is None
    with database.session() as session:
        assert SweepRepository(session).resume(sweep_id)
        assert not SweepRepository(session).resume(sweep_id)
    held = must_claim(database)
    with database.session() as session:
        assert SweepRepository(session).settle(sweep_id, complete=True) == "running"
        assert SweepRepository(session).cancel(sweep_id)
        assert not SweepRepository(session).cancel(sweep_id)
    with database.session() as session:
        assert SweepRepository(session).counts(sweep_id) == {"cancelled": 2, "placing": 1}
        assert TrialRepository(session).heartbeat(held.claim_id).cancel
    other = make_sweep(database, 1)
    finish(database, must_claim(database))
    with database.session() as session:
        assert SweepRepository(session).settle(other, complete=False) == "queued"
        assert SweepRepository(session).settle(other, complete=True) == "succeeded"
        assert SweepRepository(session).get(other).finished_at is not None


def test_only_failures_that_are_not_out_of_memory_are_counted(database: Database) -> None:
    sweep_id = make_sweep(database, 3)
    for kind in ("raised", "device_oom", "stalled"):
        held = must_claim(database)
        with database.session() as session:
            TrialRepository(session).start(held)
            TrialRepository(session).finish(held, TrialState.FAILED, reason_kind=kind, reason=f"it {kind}")
    with database.reading() as session:
        assert SweepRepository(session).recent_failures(sweep_id, 60) == ["it raised", "it stalled"]
        assert SweepRepository(session).recent_failures(sweep_id, -1) == []


def test_samples_come_back_as_a_frame_of_finished_trials(database: Database) -> None:
    make_sweep(database, 2)
    new = [NewSample("forward", r, i, 0.5 + r, 2**33, None, "tracked") for r in range(2) for i in range(3)]
    for end in (TrialState.SUCCEEDED, TrialState.FAILED):
        held = must_claim(database)
        with database.session() as session:
            TrialRepository(session).start(held, hardware_id="cpu-x", software={"torch": "2.13"})
        with database.session() as session:
            SampleRepository(session).add(
                held,
                new,
                operator="ring_dtp",
                provider="flatpeak",
                shape={"vocab": 37, "hidden": 8},
                ranks=2,
                hardware_id="cpu-x",
                operator_version=1,
                commit="abc",
            )
            TrialRepository(session).finish(held, end)
    with database.reading() as session:
        frame = SampleRepository(session).frame(operator="ring_dtp", hardware_id="cpu-x")
        assert SampleRepository(session).frame(hardware_id="cpu-y").empty
        assert len(SampleRepository(session).of_trial(held.trial.id)) == 6
    assert list(frame.columns) == list(COLUMNS)
    assert len(frame) == 6
    assert set(frame["shape_json"]) == {'{"hidden":8,"vocab":37}'}
    assert set(frame["software_json"]) == {'{"torch":"2.13"}'}
    assert frame["allocated_bytes"].max() == 2**33
    with database.reading() as session:
        pages = [SampleRepository(session).page(held.trial.sweep_id, limit=4)]
        pages.append(SampleRepository(session).page(held.trial.sweep_id, after=pages[0][-1][0], limit=4))
        assert SampleRepository(session).page(held.trial.sweep_id, after=pages[1][-1][0], limit=4) == []
        assert SampleRepository(session).page("swp_none") == []
    assert [len(page) for page in pages] == [4, 2]
    named = [dict(zip(COLUMNS, row, strict=True)) for page in pages for row in page]
    assert [(row["rank"], row["repeat"], row["seconds"]) for row in named] == [
        (one.rank, one.repeat, one.seconds) for one in new
    ]
    assert {(row["config_json"], row["shape_json"]) for row in named} == set(
        zip(frame["config_json"], frame["shape_json"], strict=True)
    )


def test_pages_continue_where_they_ended(database: Database) -> None:
    sweep_id = make_sweep(database, 5)
    ids = [sweep_id, make_sweep(database, 0), make_sweep(database, 0)]
    with database.reading() as session:
        first = TrialRepository(session).page(sweep_id, limit=3)
        rest = TrialRepository(session).page(sweep_id, limit=3, cursor=first.next_cursor)
        assert [t.number for t in first.items + rest.items] == [0, 1, 2, 3, 4]
        assert rest.next_cursor is None
        newest = SweepRepository(session).page(limit=2)
        oldest = SweepRepository(session).page(limit=2, cursor=newest.next_cursor)
        assert {s.id for s in newest.items + oldest.items} == set(ids)
        assert len(newest.items) == 2


def test_a_missing_row_and_a_wrong_state_are_named(database: Database) -> None:
    make_sweep(database, 1)
    held = must_claim(database)
    with database.reading() as session, pytest.raises(RuleError, match="trl_none"):
        TrialRepository(session).get("trl_none")
    with database.reading() as session, pytest.raises(RuleError, match="swp_none"):
        SweepRepository(session).get("swp_none")
    with database.session() as session, pytest.raises(RuleError, match="terminal"):
        TrialRepository(session).finish(held, TrialState.QUEUED)
