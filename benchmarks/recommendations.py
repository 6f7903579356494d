"""Is what `model` recommends the best there is? Every point of a sweep measured, then `model` sweeps of the same space.

    python -m benchmarks.recommendations examples/sweeps/h200-x1/*.yaml --out DIR

For each file: its grid, then two `model` sweeps that start from nothing but what ships: one with all the card's
memory, one under a limit that half of the points exceed by their bounds. What such a sweep recommends, its fastest
point, is looked up in the grid and compared with the best feasible point there. ``DIR/recommendations.csv`` gets a
row a sweep, ``DIR/samples.csv`` the grid's rows, both after every file.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import pandas as pd

from benchmarks.rows import COLUMNS
from db.lifecycle import TrialState
from db.repositories import SampleRepository, TrialRepository
from db.session import Database
from db.tables import Trial
from tuner.executors.base import OOM_KINDS
from tuner.executors.local import LocalExecutor
from tuner.machine.fingerprint import commit, local_hardware_id
from tuner.space import config_id
from tuner.sweeping.sweep import SweepProgress, SweepSpec, create_sweep, read_sweep_file, run_sweep


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What one `model` sweep said, and what the grid says of it."""

    operator: str
    sweep: str
    points: int
    limit_bytes: int | None
    feasible: int
    launched: int
    out_of_memory: int
    recommended: str
    recommended_s: float
    recommended_peak_bytes: int
    best: str
    best_s: float
    over_best: float
    hardware_id: str
    commit: str


def main() -> None:
    """Measure the grids and the `model` sweeps of the files given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="+", type=Path, help="sweep files; their strategy is not used")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tables and the database")
    parser.add_argument("--trials", type=int, default=12, help="most launches of a `model` sweep")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    executor = LocalExecutor()
    found: list[Recommendation] = []
    samples: list[pd.DataFrame] = []
    try:
        for path in args.files:
            spec = read_sweep_file(path)
            grid, frame = _run(args.out / "grid.db", spec.model_copy(update={"strategy": "grid"}), executor)
            samples.append(frame)
            pd.concat(samples)[list(COLUMNS)].to_csv(args.out / "samples.csv", index=False)
            bounds = [t.bound_bytes for t in grid if t.bound_bytes is not None]
            for number, limit in enumerate((None, int(median(bounds)))):
                wanted = {"strategy": "model", "max_trials": args.trials, "memory_limit_bytes": limit}
                # a database of its own: the grid's rows, or the other sweep's, would give the answer away
                database = args.out / f"model-{path.stem}-{number}.db"
                trials, _ = _run(database, spec.model_copy(update=wanted), executor)
                found.append(_compared(spec, grid, trials, limit))
                _write(args.out / "recommendations.csv", found)
    finally:
        executor.close()


def _run(path: Path, spec: SweepSpec, executor: LocalExecutor) -> tuple[list[Trial], pd.DataFrame]:
    database = Database(f"sqlite:///{path}")
    database.migrate()
    sweep_id = create_sweep(database, spec)
    outcome = run_sweep(database, sweep_id, executor, _Shown(f"{spec.name}, {spec.strategy}"))
    print(f"{spec.name}, {spec.strategy}: {outcome.state.value} {outcome.counts} {outcome.reason or ''}")
    with database.reading() as session:
        trials = TrialRepository(session).of_sweep(sweep_id)
        frame = SampleRepository(session).frame(sweep_id=sweep_id)
    return list(trials), frame


class _Shown:
    """A line for every tenth trial."""

    def __init__(self, name: str) -> None:
        self._name, self._last = name, 0

    def __call__(self, progress: SweepProgress) -> None:
        if progress.ended >= self._last + 10:
            self._last = progress.ended
            print(f"{self._name}: {progress.ended} of {progress.total}", flush=True)


def _compared(
    spec: SweepSpec, grid: Sequence[Trial], trials: Sequence[Trial], limit: int | None
) -> Recommendation:
    measured = [t for t in trials if t.state == TrialState.SUCCEEDED.value and t.latency_s is not None]
    chosen = min(measured, key=lambda t: t.latency_s or 0.0)
    known = {config_id(t.config_json): t for t in grid if t.state == TrialState.SUCCEEDED.value}
    feasible = [
        t for t in known.values() if limit is None or max(t.bound_bytes or 0, t.peak_bytes or 0) <= limit
    ]
    best = min(feasible, key=lambda t: t.latency_s or 0.0)
    there = known[config_id(chosen.config_json)]
    assert there.latency_s is not None
    assert best.latency_s is not None
    return Recommendation(
        operator=spec.operator,
        sweep=spec.name,
        points=len(grid),
        limit_bytes=limit,
        feasible=len(feasible),
        launched=sum(t.reason_kind != "bound" for t in trials),
        out_of_memory=sum(t.reason_kind in (*OOM_KINDS, "peak") for t in trials),
        recommended=json.dumps(chosen.config_json, sort_keys=True),
        recommended_s=there.latency_s,
        recommended_peak_bytes=there.peak_bytes or 0,
        best=json.dumps(best.config_json, sort_keys=True),
        best_s=best.latency_s,
        over_best=there.latency_s / best.latency_s,
        hardware_id=local_hardware_id(spec.target.device),
        commit=commit(),
    )


def _write(path: Path, rows: Sequence[Recommendation]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


if __name__ == "__main__":
    main()
