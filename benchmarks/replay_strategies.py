"""Compare strategies on recorded sweeps: launches until within 2 % of the best, infeasible launches, regret.

    python -m benchmarks.replay_strategies                    # every file under results/replay/recorded, and our GPUs'
    python -m benchmarks.replay_strategies head-h200-x1 --strategy model --seeds 5

Each recording is replayed three times: with room for all points, under a limit that the larger peaks exceed and
Eq. 6 rules out (as in a sweep), and under the same limit with Eq. 6 withheld, which shows what the strategies learn
from their own launches. A recording of several shapes is several tables, and every table gets all seeds.

Every run is a row of ``runs.csv.gz`` under ``benchmarks/results/replay``; what is there already is not run again. From
them ``strategies.csv`` (one row a strategy, case and recording: pooled over its tables, and its worst table),
``curves.csv`` (median regret after each launch, pooled) and ``strategies.svg`` (the case ``limit``) are written.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import io
import math
import multiprocessing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pandas as pd

from benchmarks.svg import Line, panels
from cost_model.samples import Observation, observations
from tuner.replaying.replay import STRATEGIES, Bounds, Options, Run, replay
from tuner.replaying.table import Table, read_samples, tables
from tuner.routing.rows import with_routing

FOLDER = Path(__file__).parent / "results" / "replay"
CASES = ("all fit", "limit", "limit, no Eq. 6")
_FEWEST = 8
_BESIDE = ("tpe", "gp", "random")
_ON_GPUS = (
    "nvidia-h200-x1/ring_dtp.csv",
    "nvidia-h200-x1/stream_adamw.csv",
    "nvidia-h200-x2/samples.csv",
    "nvidia-h200-x1/pipelined_llep_curves.csv",
)
_LIMIT_QUANTILE = 0.5
"""Share of the points that the limit leaves room for, by their recorded peaks."""


COLUMNS = (
    "recording", "table", "digest", "points", "case", "strategy", "seed", "trials",
    "reached", "launched", "infeasible", "ruled_out", "regret",
)  # fmt: skip
Row = dict[str, str]


@dataclass(frozen=True)
class Task:
    """One strategy on one table in one case, all seeds."""

    recording: str
    number: int
    table: Table
    case: str
    strategy: str
    seeds: tuple[int, ...]
    trials: int
    warm: tuple[Observation, ...] | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """What makes its runs its own: another recording of the same name is replayed again."""
        return (
            self.recording,
            str(self.number),
            digest(self.table),
            self.case,
            self.strategy,
            str(self.trials),
        )

    def run(self) -> list[Row]:
        """The runs as rows."""
        plain, blind = self.strategy.removesuffix(" warm"), self.case == "limit, no Eq. 6"
        bounds: Bounds = "rule"
        if blind:
            bounds = "shape" if plain == "model" else "none"
        options = Options(
            trials=self.trials,
            limit_bytes=None if self.case == "all fit" else limit_of(self.table),
            bounds=bounds,
        )
        done = replay(
            self.table, plain.removesuffix(" blind"), options, seeds=self.seeds, warm=self.warm
        ).runs
        return [self._row(run) for run in done]

    def _row(self, run: Run) -> Row:
        name, number, mark, case, strategy, trials = self.key
        told = (
            name, number, mark, str(len(self.table.points)), case, strategy, str(run.seed), trials,
            "" if run.reached is None else str(run.reached), str(len(run.launched)), str(run.infeasible),
            str(run.ruled_out), " ".join(f"{r:.5f}" for r in run.regret),
        )  # fmt: skip
        return dict(zip(COLUMNS, told, strict=True))


def digest(table: Table) -> str:
    """Short name of what a table holds."""
    text = repr(
        [(point.config, point.repeats, point.peak_bytes, point.bound_bytes) for point in table.points]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:8]


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


def tasks(
    name: str,
    samples: pd.DataFrame,
    *,
    strategies: Sequence[str],
    cases: Sequence[str],
    seeds: int,
    trials: int,
) -> Iterator[Task]:
    """Every strategy in every case on every table of one recording."""
    found = tables(samples, fewest=_FEWEST)
    for case in cases:
        for strategy in strategies:
            if strategy.endswith(" warm") and len(found) == 1:
                continue
            if strategy.endswith(" blind") and case != "limit, no Eq. 6":
                continue
            for number, table in enumerate(found):
                warm = tuple(_others(samples, table)) if strategy.endswith(" warm") else None
                yield Task(name, number, table, case, strategy, tuple(range(seeds)), trials, warm)


def _others(samples: pd.DataFrame, table: Table) -> list[Observation]:
    """Observations of the recording's other shapes, thinned to what a sweep would take."""
    found, _ = observations(with_routing(samples), table.hardware_id)
    other = [o for o in found if any(o.values.get(k) != v for k, v in table.shape.items())]
    return other[:: max(1, len(other) // 48)][:48]


def read_runs(path: Path) -> list[Row]:
    """Rows of ``runs.csv.gz``."""
    if not path.exists():
        return []
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_runs(rows: Iterable[Row], path: Path) -> None:
    """Rows in one order, whatever order they were made in."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    whole = [c for c in COLUMNS if c not in ("seed", "regret")]
    writer.writerows(sorted(rows, key=lambda r: ([r[c] for c in whole[:6]], int(r["seed"]))))
    with path.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
        packed.write(text.getvalue().encode())


def reached_of(rows: Sequence[Row]) -> list[int]:
    """Launches until within 2 % of every run; a miss counts as one more than allowed."""
    return [int(r["reached"]) if r["reached"] else int(r["trials"]) + 1 for r in rows]


def curve_of(rows: Sequence[Row]) -> list[float]:
    """Median regret after each launch; a run that stopped stays where it was."""
    trials = int(rows[0]["trials"])
    curves = [[float(x) for x in r["regret"].split()] for r in rows]
    padded = [[*c, *[c[-1] if c else math.inf] * (trials - len(c))] for c in curves]
    return [median(one[i] for one in padded) for i in range(trials)]


def grouped(rows: Iterable[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Rows by recording, case and strategy, in this order."""
    order = ("model", "model warm", "model blind", "tpe", "gp", "random")
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["recording"], row["case"], row["strategy"]), []).append(row)
    return dict(
        sorted(found.items(), key=lambda kv: (kv[0][0], CASES.index(kv[0][1]), order.index(kv[0][2])))
    )


def summary(rows: Sequence[Row]) -> Mapping[str, str | int | float]:
    """One line of ``strategies.csv``: all tables together, and the table that is worst in the median of its seeds."""
    by_table: dict[str, list[Row]] = {}
    for row in rows:
        by_table.setdefault(row["table"], []).append(row)
    worst = max(median(reached_of(own)) for own in by_table.values())
    reached, infeasible = reached_of(rows), [int(r["infeasible"]) for r in rows]
    return {
        "points": sum(int(own[0]["points"]) for own in by_table.values()),
        "tables": len(by_table),
        "runs": len(rows),
        "reached_median": median(reached),
        "reached_worst_table": worst,
        "missed": sum(not r["reached"] for r in rows),
        "launched_median": median(int(r["launched"]) for r in rows),
        "infeasible_median": median(infeasible),
        "infeasible_most": max(infeasible),
        "ruled_out_median": median(int(r["ruled_out"]) for r in rows),
        "final_regret_median": f"{curve_of(rows)[-1]:.4f}",
    }


def write_tables(rows: Sequence[Row], folder: Path) -> None:
    """``strategies.csv``, ``curves.csv`` and ``strategies.svg`` from the runs."""
    found = grouped(rows)
    with (folder / "strategies.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        for place, (key, own) in enumerate(found.items()):
            line = summary(own)
            if place == 0:
                writer.writerow(["recording", "case", "strategy", *line])
            writer.writerow([*key, *line.values()])
    drawn: dict[str, list[Line]] = {}
    with (folder / "curves.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["recording", "case", "strategy", "launches", "regret"])
        for (recording, case, strategy), own in found.items():
            curve = curve_of(own)
            for launches, regret in enumerate(curve, 1):
                told = f"{regret:.5f}" if math.isfinite(regret) else ""
                writer.writerow([recording, case, strategy, launches, told])
            if case == "limit" and strategy != "model warm":
                drawn.setdefault(recording, []).append(Line(strategy, [100 * x for x in curve]))
    (folder / "strategies.svg").write_text(
        panels(drawn, x="launches", y="above the best feasible point, % (median)", mark=2.0), encoding="utf-8"
    )


def _run(task: Task) -> tuple[Task, list[Row]]:
    return task, task.run()


def main() -> None:
    """Replay what was not replayed yet, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="recordings; default: all")
    parser.add_argument("--seeds", type=int, default=20, help="runs of a strategy on every table")
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--case", action="append", choices=CASES, help="default: all three")
    parser.add_argument("--strategy", action="append", help="default: all")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where rows are kept")
    parser.add_argument(
        "--again", action="store_true", help="drop the kept rows of what is named, and replay it"
    )
    args = parser.parse_args()
    strategies = args.strategy or [
        "model",
        "model warm",
        "model blind",
        *(s for s in STRATEGIES if s in _BESIDE),
    ]
    wanted = [
        task
        for name, samples in recordings()
        if not args.names or name in args.names
        for task in tasks(
            name,
            samples,
            strategies=strategies,
            cases=args.case or CASES,
            seeds=args.seeds,
            trials=args.trials,
        )
    ]
    # a Gaussian process takes a hundred times as long as all others together
    wanted.sort(key=lambda task: task.strategy == "gp")
    path = args.folder / "runs.csv.gz"
    kept: dict[tuple[str, ...], list[Row]] = {}
    for row in read_runs(path):
        key = ("recording", "table", "digest", "case", "strategy", "trials")
        kept.setdefault(tuple(row[c] for c in key), []).append(row)
    # rows of a recording that was taken anew are of no use any more
    now = {task.key[:3] for task in wanted}
    kept = {k: v for k, v in kept.items() if k[:3] in now or k[:2] not in {t[:2] for t in now}}
    left = [t for t in wanted if args.again or len(kept.get(t.key, ())) != len(t.seeds)]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        for task, rows in pool.imap_unordered(_run, left):
            kept[task.key] = rows
            reached, infeasible = reached_of(rows), [int(r["infeasible"]) for r in rows]
            print(
                f"{task.recording:18s} table {task.number} {task.case:16s} {task.strategy:11s} "
                f"within 2 % after {median(reached):4.1f}  "
                f"infeasible {median(infeasible):g} (most {max(infeasible)})",
                flush=True,
            )
            write_runs((row for own in kept.values() for row in own), path)
    write_tables([row for own in kept.values() for row in own], args.folder)


if __name__ == "__main__":
    main()
