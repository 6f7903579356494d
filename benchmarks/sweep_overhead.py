"""What a sweep costs beside what it measures, on warm gangs of two CPU ranks.

    python -m benchmarks.sweep_overhead
    python -m benchmarks.sweep_overhead --executor ray

Two figures:

* tiny trials of a real operator (the head, a few thousand elements) a minute, the gang's start counted;
* on trials whose repeats last two seconds together, the share of the wall time between a trial's first and last
  repeat, from the first trial's first repeat to the last trial's last one; beside it, the share that begins with
  a trial's first warm-up.
"""
# ruff: noqa: ARG002 - an adapter takes what the protocol gives it

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from db.session import Database
from operators.ranks import Ranks
from tuner.executors.base import Executor
from tuner.registry import Runnable, Shape, check_keys
from tuner.space import Config, Knob, Space
from tuner.sweeping.sweep import create_sweep, parse_sweep, run_sweep

RANKS = 2
TRIAL_S = 2.0


class Sleeper:
    """One repetition sleeps ``pause_s``; rank 0 notes when each begins and ends in the file ``log``."""

    name = "sleeper"
    version = 1
    providers = ("flatpeak",)
    has_peers, multiplies = False, False

    def shape(self, given: Mapping[str, Any], ranks: int) -> Shape:
        return check_keys(self.name, given, {"log": str, "pause_s": float}, {})

    def space(self, shape: Shape, ranks: int, provider: str) -> Space:
        return Space((Knob("point", (0,), "ordered"),))

    def canonical(self, shape: Shape, config: Config, ranks: int) -> Config:
        return config

    def bound_bytes(self, shape: Shape, config: Config, ranks: int, provider: str) -> dict[str, int]:
        return {"rows": 4096}

    def build(self, shape: Shape, config: Config, ranks: Ranks, device: str, provider: str) -> Runnable:
        rows = torch.ones(1024)

        def run() -> None:
            began = time.time()
            time.sleep(shape["pause_s"])
            ranks.all_reduce(rows[:1])
            if ranks.rank == 0:
                with Path(shape["log"]).open("a") as log:
                    log.write(json.dumps([config["point"], began, time.time()]) + "\n")

        return Runnable({"forward": run}, held=(rows,))

    def reference_check(
        self, shape: Shape, config: Config, ranks: Ranks, device: str, provider: str
    ) -> tuple[float, float]:
        return 0.0, 1.0


ADAPTER = Sleeper()


@dataclass(frozen=True)
class Shares:
    """Shares of the wall time, and the median gap between one trial's last repeat and the next one's first."""

    repeats: float
    repetitions: float
    gap_s: float
    trials: int


def tiny_trials_per_minute(database: Database, executor: Executor, trials: int) -> float:
    """Distinct points of a tiny head, from no gang at all to the last answer."""
    spec = {
        "operator": "ring_dtp",
        "target": {"ranks": RANKS},
        "shape": {"tokens_per_rank": 64, "hidden": 32, "vocab": 256},
        "space": {
            "strip_rows": [2 * (i + 1) for i in range(trials // 2)],
            "ring_mode": ["weights", "activations"],
        },
        "max_trials": trials,
    }
    sweep_id = create_sweep(database, parse_sweep(spec))
    began = time.perf_counter()
    outcome = run_sweep(database, sweep_id, executor)
    seconds = time.perf_counter() - began
    done = outcome.counts.get("succeeded", 0)
    if done == 0 or set(outcome.counts) != {"succeeded"}:
        raise RuntimeError(f"the tiny sweep ended with {outcome.counts}: {outcome.reason}")
    return 60.0 * done / seconds


def measured_share(database: Database, executor: Executor, log: Path, *, trials: int, repeats: int) -> Shares:
    """How much of the wall time is measuring, on trials of :data:`TRIAL_S` seconds."""
    spec = {
        "operator": "benchmarks.sweep_overhead:ADAPTER",
        "target": {"ranks": RANKS},
        "shape": {"log": str(log), "pause_s": TRIAL_S / repeats},
        "space": {"point": list(range(trials))},
        "repeats": repeats,
    }
    outcome = run_sweep(database, create_sweep(database, parse_sweep(spec)), executor)
    if outcome.counts != {"succeeded": trials}:
        raise RuntimeError(f"the sweep ended with {outcome.counts}: {outcome.reason}")
    runs: dict[int, list[tuple[float, float]]] = {}
    for line in log.read_text().splitlines():
        point, began, ended = json.loads(line)
        runs.setdefault(point, []).append((began, ended))
    order = sorted(runs.values(), key=lambda times: times[0][0])
    repeats_of = [times[-repeats:] for times in order]
    wall = repeats_of[-1][-1][1] - repeats_of[0][0][0]
    gaps = sorted(after[0][0] - before[-1][1] for before, after in pairwise(order))
    return Shares(
        repeats=sum(times[-1][1] - times[0][0] for times in repeats_of) / wall,
        repetitions=sum(times[-1][1] - times[0][0] for times in order) / (order[-1][-1][1] - order[0][0][0]),
        gap_s=gaps[len(gaps) // 2],
        trials=len(order),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--executor", choices=["local", "ray"], default="local")
    parser.add_argument("--ray-address", default=None)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=20, help="repeats of a trial of two seconds")
    options = parser.parse_args()
    executor: Executor
    if options.executor == "ray":
        from tuner.executors.ray import RayExecutor

        executor = RayExecutor(options.ray_address)
    else:
        from tuner.executors.local import LocalExecutor

        executor = LocalExecutor()
    with tempfile.TemporaryDirectory(prefix="flatpeak-overhead-") as folder:
        database = Database(f"sqlite:///{folder}/flatpeak.db")
        database.migrate()
        try:
            rate = tiny_trials_per_minute(database, executor, options.trials)
            print(f"tiny {RANKS}-rank trials a minute: {rate:.0f} (asked: 20)")
            shares = measured_share(
                database, executor, Path(folder) / "log", trials=10, repeats=options.repeats
            )
        finally:
            executor.close()
            database.close()
    print(
        f"trials of {TRIAL_S:g} s ({options.repeats} repeats, {shares.trials} trials): "
        f"{shares.repeats:.1%} of the wall time between a trial's first and last repeat (asked: 85 %); "
        f"{shares.repetitions:.1%} between its first warm-up and its last repeat; "
        f"{shares.gap_s * 1e3:.0f} ms from one trial's end to the next one's first warm-up"
    )


if __name__ == "__main__":
    main()
