"""Sweeps over two hosts at three rates, with real ranks, one Ray node a host and gloo between them.

    python -m benchmarks.two_hosts                         # as root: 100mbit, 1gbit, 10gbit; rows and table
    python -m benchmarks.two_hosts --rates 1gbit --rounds 1
    python -m benchmarks.two_hosts --report                # the table again, from the rows that are kept

Hosts are network namespaces of this machine (``benchmarks.netns``). At each rate the dispatch is swept over K ×
schedule and the head over ring mode × strip rows, ``--rounds`` times in another order, so that what else the machine
does falls on all points alike. Rows go to ``benchmarks/results/two-hosts/RATE.csv.gz`` in the samples' columns.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.netns import Hosts
from benchmarks.two_hosts_report import FOLDER, SHAPES, read, report
from db.repositories import SampleRepository
from db.session import Database

RATES = ("100mbit", "1gbit", "10gbit")
COLUMNS = (
    *("operator", "provider", "config_json", "shape_json", "ranks", "pass", "rank", "repeat", "seconds"),
    *("allocated_bytes", "reserved_bytes", "peak_source", "hardware_id", "operator_version", "commit"),
)
SPACES: dict[str, dict[str, list[Any]]] = {
    "pipelined_llep": {
        "chunks": [1, 2, 4, 8, 16],
        "dispatch_schedule": ["serial", "prefetch", "overlap"],
    },
    "ring_dtp": {"ring_mode": ["activations", "weights", "gather"], "strip_rows": [256, 512, 1024]},
}
_SWEEP_S = 1800.0


def sweep_file(operator: str, *, repeats: int, seed: int) -> dict[str, Any]:
    """Every point of the operator's space once, in a random order, one rank on each of two hosts."""
    return {
        "operator": operator,
        "name": f"{operator} over two hosts",
        "target": {"ranks": 2, "nodes": 2, "device": "cpu"},
        "shape": SHAPES[operator],
        "space": SPACES[operator],
        "strategy": "random",
        "seed": seed,
        "repeats": repeats,
    }


def measure(rate: str, *, rounds: int, repeats: int, operators: Sequence[str]) -> pd.DataFrame:
    """Sweep at one rate; the samples of all rounds, repeats counted on from round to round."""
    with tempfile.TemporaryDirectory(prefix="flatpeak-two-hosts-") as folder, Hosts(rate) as hosts:
        url = f"sqlite:///{folder}/rows.db"
        for number in range(rounds):
            for operator in operators:
                path = Path(folder) / f"{operator}-{number}.json"
                path.write_text(json.dumps(sweep_file(operator, repeats=repeats, seed=number)))
                command = [sys.executable, "-m", "api.cli", "sweep", str(path), "--executor", "ray"]
                command += ["--ray-address", hosts.address, "--database", url, "--json"]
                done = hosts.run(command, timeout_s=_SWEEP_S)
                if done.returncode != 0:
                    raise SystemExit(f"{rate}: the sweep failed: {done.stderr[-2000:]}{done.stdout[-2000:]}")
                print(f"{rate}: {operator}, round {number + 1} of {rounds}", flush=True)
        database = Database(url)
        with database.reading() as session:
            frame = SampleRepository(session).frame()
        database.close()
    return numbered(frame)


def numbered(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows in the columns that are kept; a later sweep's repeats of a point count on from the earlier one's."""
    point = ["operator", "shape_json", "config_json", "pass", "rank"]
    frame = frame.assign(repeat=frame.groupby(point, sort=False).cumcount())
    return frame[list(COLUMNS)]


def beside(path: Path, frame: pd.DataFrame) -> pd.DataFrame:
    """New rows, and what the file has of operators that they are not of."""
    if not path.exists():
        return frame
    kept = pd.read_csv(path)
    return pd.concat([frame, kept[~kept["operator"].isin(frame["operator"])]], ignore_index=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", nargs="+", default=RATES)
    parser.add_argument("--operators", nargs="+", default=tuple(SPACES), choices=tuple(SPACES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--report", action="store_true", help="measure nothing: the table from kept rows")
    options = parser.parse_args(arguments)
    if not options.report:
        options.out.mkdir(parents=True, exist_ok=True)
        for rate in options.rates:
            frame = measure(rate, rounds=options.rounds, repeats=options.repeats, operators=options.operators)
            beside(options.out / f"{rate}.csv.gz", frame).to_csv(options.out / f"{rate}.csv.gz", index=False)
    missing = {
        rate: sorted(left)
        for rate in options.rates
        if (left := set(SPACES) - set(read(options.out, rate)["operator"]))
    }
    print(f"no table: rows are missing of {missing}" if missing else report(options.out, options.rates))


if __name__ == "__main__":
    main()
