"""Rows for tests, written through the repositories as a worker writes them."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

from db.lifecycle import TrialState
from db.repositories import CostModelRepository, NewTrial, SampleRepository, SweepRepository, TrialRepository
from db.repositories.samples import NewSample
from db.session import Database

MIB = 2**20
LIMIT = 64 * MIB
HARDWARE = "test-cpu-x4-0123456789ab"
STRIPS = (256, 512, 1024, 2048)
MODES = ("activations", "weights")
RANKS = 4
REPEATS = 3
SHAPE: dict[str, Any] = {"tokens_per_rank": 4096, "hidden": 256, "vocab": 8192, "dtype": "float32"}


@dataclass(frozen=True)
class Seeded:
    """What a database was filled with."""

    sweep_id: str
    trial_ids: list[str]


def spec(**changes: Any) -> dict[str, Any]:
    """A sweep file of the seeded sweep."""
    return {
        "operator": "ring_dtp",
        "provider": "flatpeak",
        "target": {"ranks": RANKS, "device": "cpu"},
        "shape": SHAPE,
        "space": {"ring_mode": list(MODES), "strip_rows": list(STRIPS)},
        "strategy": "grid",
        "repeats": REPEATS,
        "memory_limit_bytes": LIMIT,
        **changes,
    }


def seed_sweep(database: Database, *, finish: bool = True, name: str = "Ring-DTP on four ranks") -> Seeded:
    """A sweep of eight trials: five measured, two over the limit, one failed; or all but those queued."""
    with database.session() as session:
        sweep = SweepRepository(session).create(
            name=name,
            operator="ring_dtp",
            provider="flatpeak",
            strategy="grid",
            ranks=RANKS,
            device="cpu",
            spec=spec(),
            max_trials=len(STRIPS) * len(MODES),
        )
        trials = TrialRepository(session).add(
            sweep.id, [_new(number, *point) for number, point in enumerate(itertools.product(MODES, STRIPS))]
        )
        ids = [trial.id for trial in trials]
        sweep_id = sweep.id
    if finish:
        work(database, sweep_id)
    return Seeded(sweep_id, ids)


def _new(number: int, mode: str, rows: int) -> NewTrial:
    terms = {
        "strips": rows * 8192 * 4,
        "movers": (12 if mode == "weights" else 4) * MIB,
        "accumulators": 6 * MIB,
    }
    bound = sum(terms.values())
    over = (
        f"its bound of {bound} bytes a rank exceeds the limit of {LIMIT} bytes (Eq. 6)"
        if bound > LIMIT
        else None
    )
    return NewTrial({"ring_mode": mode, "strip_rows": rows}, f"c{number}", "grid", bound, terms, over)


def work(database: Database, sweep_id: str, most: int = 100) -> int:
    """Answer queued trials as a worker would; returns how many. The last one fails."""
    done = 0
    while done < most:
        with database.session() as session:
            claim = TrialRepository(session).claim("test/1/1", sweep_ids=[sweep_id])
            if claim is None:
                break
            SweepRepository(session).mark_running(sweep_id)
            TrialRepository(session).start(claim, hardware_id=HARDWARE, software={"torch": "test"})
        with database.session() as session:
            trials = TrialRepository(session)
            config = claim.trial.config_json
            if config == {"ring_mode": "weights", "strip_rows": 1024}:
                trials.finish(
                    claim,
                    TrialState.FAILED,
                    reason_kind="raised",
                    reason="a rank raised",
                    log_tail="Traceback\nboom <b>",
                )
            else:
                rows, samples = config["strip_rows"], _samples(claim.trial.number, config)
                trials.finish(
                    claim,
                    TrialState.SUCCEEDED,
                    result={"fast_s": 0.05, "error": 1e-7},
                    latency_s=0.04 + 20 / rows / 4,
                    peak_bytes=int((claim.trial.bound_bytes or 0) * 0.9),
                    log_tail="repeat 3 of 3",
                )
                SampleRepository(session).add(
                    claim,
                    samples,
                    operator="ring_dtp",
                    provider="flatpeak",
                    shape=SHAPE,
                    ranks=RANKS,
                    hardware_id=HARDWARE,
                    operator_version=1,
                    commit="test",
                )
        done += 1
    with database.session() as session:
        SweepRepository(session).settle(sweep_id, complete=True)
    return done


def seed_mixed(database: Database) -> str:
    """A sweep over two nodes: one trial of two modes, one pruned, one that ran out of memory, one failed."""
    answers: list[tuple[TrialState, dict[str, Any]]] = [
        (
            TrialState.SUCCEEDED,
            {"latency_s": 0.05, "peak_bytes": 9 * MIB, "result": {"slow_s": 0.07, "slow_share": 0.4}},
        ),
        (TrialState.PRUNED, {"latency_s": 0.9, "peak_bytes": 10 * MIB, "reason_kind": "pruned"}),
        (TrialState.INFEASIBLE, {"reason_kind": "device_oom", "reason": "rank 0: out of memory"}),
        (TrialState.FAILED, {"reason_kind": "stalled", "reason": "no repetition finished in 120 s"}),
    ]
    with database.session() as session:
        sweep = SweepRepository(session).create(
            name="Two nodes",
            operator="ring_dtp",
            provider="flatpeak",
            strategy="model",
            ranks=RANKS,
            device="cpu",
            spec=spec(target={"ranks": RANKS, "nodes": 2, "device": "cpu"}, strategy="model"),
            max_trials=len(answers),
        )
        TrialRepository(session).add(
            sweep.id, [_new(number, "weights", 64 << number) for number in range(len(answers))]
        )
        for state, answer in answers:
            claim = TrialRepository(session).claim("test/1/1", sweep_ids=[sweep.id])
            assert claim is not None
            TrialRepository(session).start(claim, hardware_id=HARDWARE)
            TrialRepository(session).finish(claim, state, **answer)
        SweepRepository(session).settle(sweep.id, complete=True)
        return sweep.id


def _samples(number: int, config: dict[str, Any]) -> list[NewSample]:
    draw = random.Random(number)
    return [
        NewSample(
            pass_name,
            rank,
            repeat,
            (1 + share) * (0.015 + 5 / config["strip_rows"] / 4) * draw.uniform(0.95, 1.1),
            (20 + rank) * MIB,
            None,
            "tracked",
        )
        for share, pass_name in enumerate(("forward", "backward"))
        for rank in range(RANKS)
        for repeat in range(REPEATS)
    ]


def seed_cost_model(database: Database, model: dict[str, Any], *, promoted: bool = True) -> str:
    """A stored cost model of the seeded hardware."""
    report = {
        "operators": [
            {
                "operator": "ring_dtp",
                "rows": 10,
                "held_out": 4,
                "median_error": 0.06,
                "prior_error": 0.4,
                "promoted": True,
                "bimodal": [],
                "message": "",
            }
        ],
        "messages": [],
        "promoted": True,
    }
    with database.session() as session:
        return CostModelRepository(session).add(HARDWARE, model, report=report, promoted=promoted).id
