"""Compare strategies on recorded sweeps: launches until within 2 % of the best, infeasible launches, regret.

    python -m benchmarks.replay_strategies                    # every file under results/replay/recorded
    python -m benchmarks.replay_strategies head --seeds 5

Writes ``strategies.csv`` (one row a strategy and recording), ``curves.csv`` (median regret after each launch) and
``strategies.svg`` under ``benchmarks/results/replay``. Each recording is replayed three times: with room for all
points, under a limit that the larger peaks exceed and Eq. 6 rules out (as in a sweep), and under the same limit
with Eq. 6 withheld, which shows what the strategies learn from their own launches.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pandas as pd

from benchmarks.svg import Line, panels
from cost_model.samples import Observation, observations
from tuner.replay import STRATEGIES, Options, Run, replay
from tuner.replay_table import Table, read_samples, tables

FOLDER = Path(__file__).parent / "results" / "replay"
CASES = ("all fit", "limit", "limit, no Eq. 6")
_FEWEST = 8
_ON_GPUS = (
    "nvidia-h200-x1/ring_dtp.csv",
    "nvidia-h200-x1/stream_adamw.csv",
    "nvidia-h200-x2/samples.csv",
    "nvidia-h200-x1/pipelined_llep_curves.csv",
)
_LIMIT_QUANTILE = 0.5
"""Share of the points that the limit leaves room for, by their recorded peaks."""


@dataclass(frozen=True)
class Result:
    """One strategy on all tables of a recording."""

    recording: str
    case: str
    strategy: str
    points: int
    tables: int
    runs: tuple[Run, ...]
    trials: int

    @property
    def reached(self) -> float:
        """Median launches until within 2 %; a miss counts as one more than allowed."""
        return median(r.reached if r.reached is not None else self.trials + 1 for r in self.runs)

    @property
    def curve(self) -> list[float]:
        """Median regret after each launch."""
        padded = [
            [*r.regret, *[r.regret[-1] if r.regret else math.inf] * (self.trials - len(r.regret))]
            for r in self.runs
        ]
        return [median(one[i] for one in padded) for i in range(self.trials)]


def recordings() -> Iterator[tuple[str, pd.DataFrame]]:
    """Our own operators' rows: recorded sweeps of this machine, then those of one and of two H200."""
    for path in sorted((FOLDER / "recorded").glob("*.csv*")):
        yield path.name.partition(".")[0], read_samples(path)
    for file in _ON_GPUS:
        path = FOLDER.parent / file
        if not path.exists():
            continue
        samples = read_samples(path)
        samples = samples[samples["provider"] == "flatpeak"]
        # of the optimizer β × s is what is searched: its engine follows from memory
        streams = samples["config_json"].str.contains('"engine": ?"stream"')
        samples = samples[streams | (samples["operator"] != "stream_adamw")]
        for operator, own in samples.groupby("operator", sort=True):
            if tables(own, fewest=_FEWEST):
                yield f"{path.parent.name.removeprefix('nvidia-')} {operator}", own


def limit_of(table: Table) -> int:
    """A limit that about half of the points keep, by the larger of bound and peak."""
    needs = sorted(max(p.bound_bytes or 0, p.peak_bytes or 0) for p in table.points)
    return needs[max(0, math.ceil(_LIMIT_QUANTILE * len(needs)) - 1)]


def compare(
    name: str,
    samples: pd.DataFrame,
    strategies: Sequence[str],
    *,
    cases: Sequence[str],
    seeds: int,
    trials: int,
) -> list[Result]:
    """Every strategy in every case, over all tables of one recording."""
    found = tables(samples, fewest=_FEWEST)
    per_table = max(1, math.ceil(seeds / len(found)))
    results = []
    for case in cases:
        for strategy in strategies:
            plain = strategy.removesuffix(" warm")
            if strategy != plain and len(found) == 1:
                continue
            runs: list[Run] = []
            for number, table in enumerate(found):
                options = Options(
                    trials=trials,
                    limit_bytes=None if case == "all fit" else limit_of(table),
                    bounds=case != "limit, no Eq. 6",
                )
                warm = _others(samples, table) if strategy != plain else []
                first = number * per_table
                seeds_here = range(first, first + per_table)
                runs += replay(table, plain, options, seeds=seeds_here, warm=warm).runs
            points = sum(len(table.points) for table in found)
            result = Result(name, case, strategy, points, len(found), tuple(runs), trials)
            print(
                f"{name:16s} {case:16s} {strategy:11s} within 2 % after {result.reached:4.1f}  "
                f"infeasible {median(r.infeasible for r in runs):g} (most {max(r.infeasible for r in runs)})  "
                f"launched {median(len(r.launched) for r in runs):g}  regret {100 * result.curve[-1]:.1f} %",
                flush=True,
            )
            results.append(result)
    return results


def _others(samples: pd.DataFrame, table: Table) -> list[Observation]:
    """Observations of the recording's other shapes, thinned to what a sweep would take."""
    found, _ = observations(samples, table.hardware_id)
    other = [o for o in found if any(o.values.get(k) != v for k, v in table.shape.items())]
    return other[:: max(1, len(other) // 48)][:48]


def _write(results: Iterable[Result], folder: Path) -> None:
    rows = list(results)
    with (folder / "strategies.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            [
                "recording", "case", "strategy", "points", "tables", "runs",
                "reached_median", "reached_worst", "missed",
                "launched_median", "infeasible_median", "infeasible_most", "ruled_out_median", "final_regret_median",
            ]
        )  # fmt: skip
        for r in rows:
            reached = [run.reached if run.reached is not None else r.trials + 1 for run in r.runs]
            writer.writerow(
                [
                    r.recording, r.case, r.strategy, r.points, r.tables, len(r.runs), r.reached, max(reached),
                    sum(run.reached is None for run in r.runs),
                    median(len(run.launched) for run in r.runs),
                    median(run.infeasible for run in r.runs), max(run.infeasible for run in r.runs),
                    median(run.ruled_out for run in r.runs), f"{r.curve[-1]:.4f}",
                ]
            )  # fmt: skip
    with (folder / "curves.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["recording", "case", "strategy", "launches", "regret"])
        for r in rows:
            for launches, regret in enumerate(r.curve, 1):
                writer.writerow(
                    [
                        r.recording,
                        r.case,
                        r.strategy,
                        launches,
                        f"{regret:.5f}" if math.isfinite(regret) else "",
                    ]
                )
    drawn: dict[str, list[Line]] = {}
    for r in rows:
        if r.case != "limit":
            continue
        drawn.setdefault(r.recording, []).append(Line(r.strategy, [100 * x for x in r.curve]))
    (folder / "strategies.svg").write_text(
        panels(drawn, x="launches", y="above the best feasible point, % (median)", mark=2.0), encoding="utf-8"
    )


def main() -> None:
    """Replay, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="recordings; default: all")
    parser.add_argument("--seeds", type=int, default=20, help="runs of a strategy, spread over the tables")
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--write", action="store_true", help="write files although only some are named")
    parser.add_argument("--case", action="append", choices=CASES, help="default: all three")
    parser.add_argument("--strategy", action="append", help="default: all")
    args = parser.parse_args()
    strategies = args.strategy or [
        "model",
        "model warm",
        *(s for s in STRATEGIES if s not in ("model", "grid")),
    ]
    results = []
    for name, samples in recordings():
        if not args.names or name in args.names:
            results += compare(
                name, samples, strategies, cases=args.case or CASES, seeds=args.seeds, trials=args.trials
            )
            if args.write or not args.names:
                _write(results, FOLDER)


if __name__ == "__main__":
    main()
