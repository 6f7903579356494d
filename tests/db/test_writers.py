"""Eight processes on one database: no trial lost, none done twice, no refusal for a lock."""

from __future__ import annotations

import multiprocessing as mp
from collections import Counter

from db.lifecycle import TrialState
from db.repositories import EventRepository, SampleRepository, SweepRepository, TrialRepository
from db.repositories.samples import NewSample
from db.session import Database
from tests.db.test_trials import make_sweep

WORKERS = 8
TRIALS = 240


def _work(url: str, name: str) -> int:
    """Claim, start, measure and finish until nothing is queued; every fifth claim is dropped as if killed."""
    database = Database(url)
    done = claimed = 0
    idle = 0
    while idle < 3:
        with database.session() as session:
            TrialRepository(session).reap()
        with database.session() as session:
            trials = TrialRepository(session)
            held = trials.claim(name, lease_s=120.0)
            if held is not None and claimed % 5 == 4 and held.attempt.number == 0:
                trials.heartbeat(held.claim_id, lease_s=-1.0)  # it dies: its lease is over
                claimed += 1
                continue
        if held is None:
            idle += 1
            continue
        idle = 0
        claimed += 1
        with database.session() as session:
            SweepRepository(session).mark_running(held.trial.sweep_id)
            TrialRepository(session).start(held)
        with database.session() as session:
            TrialRepository(session).heartbeat(held.claim_id)
        with database.session() as session:
            SampleRepository(session).add(
                held,
                [NewSample("forward", 0, 0, 1.0, 1, None, "tracked")],
                operator="ring_dtp",
                provider="flatpeak",
                shape={},
                ranks=1,
                hardware_id="x",
                operator_version=1,
                commit="",
            )
            TrialRepository(session).finish(held, TrialState.SUCCEEDED, latency_s=1.0)
        done += 1
    database.close()
    return done


def test_eight_writers_lose_nothing_and_double_nothing(database: Database, empty_url: str) -> None:
    sweep_id = make_sweep(database, TRIALS)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "operators.ranks"])
    with context.Pool(WORKERS) as pool:
        done = pool.starmap(_work, [(empty_url, f"w{i}") for i in range(WORKERS)])
    with database.reading() as session:
        assert SweepRepository(session).counts(sweep_id) == {"succeeded": TRIALS}
        frame = SampleRepository(session).frame(sweep_id=sweep_id)
        events = EventRepository(session).after(sweep_id=sweep_id, limit=100_000)
    assert sum(done) == TRIALS
    assert sorted(Counter(frame["trial_id"]).values()) == [1] * TRIALS
    ended = Counter(e.trial_id for e in events if e.kind == "trial.succeeded")
    assert sorted(ended.values()) == [1] * TRIALS
    assert sum(e.kind == "sweep.running" for e in events) == 1
