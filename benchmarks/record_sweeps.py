"""Record exhaustive sweeps: every point of a space measured, for strategies to be compared on (`flatpeak replay`).

    python -m benchmarks.record_sweeps                      # all of them, at full
    python -m benchmarks.record_sweeps dispatch --points 40
    python -m benchmarks.record_sweeps --device cuda --ranks 2 head

Three spaces, at least 300 points each: the dispatch over (N, routing profile, K, schedule), the optimizer's bucket
size × staging slots, the head's strip rows × ring mode. Shapes are small, so that two CPU cores do it in minutes;
each point has ``--repeats`` repeats. Rows go to ``benchmarks/results/replay/recorded/NAME.csv.gz`` in the samples'
columns; a run that was stopped goes on where it was, and points are visited in a random order, so that a part of
them is a sample.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from tuner.executors.base import GangTask, Timers
from tuner.executors.local import LocalExecutor
from tuner.fingerprint import commit, local_hardware_id
from tuner.measure import MeasureRequest
from tuner.registry import load_adapter, reference
from tuner.space import Config

FOLDER = Path(__file__).parent / "results" / "replay" / "recorded"
COLUMNS = (
    "operator", "provider", "config_json", "shape_json", "ranks", "pass", "rank", "repeat", "seconds",
    "allocated_bytes", "reserved_bytes", "peak_source", "hardware_id", "operator_version", "commit",
)  # fmt: skip
Point = tuple[dict[str, Any], Config]


def dispatch() -> Iterator[Point]:
    """306 points: three N, three routers, twelve K, three schedules (one where K = 1)."""
    for tokens in (256, 512, 1024):
        for profile in ("balanced", "skew:80/2", "one_hot"):
            shape = {
                "tokens_per_rank": tokens, "hidden": 64, "intermediate": 64, "experts": 8, "top_k": 2,
                "profile": profile, "min_rows": 16,
            }  # fmt: skip
            for chunks in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64):
                for schedule in ("serial", "prefetch", "overlap"):
                    yield shape, {"chunks": chunks, "dispatch_schedule": schedule}


def optimizer() -> Iterator[Point]:
    """320 points: forty bucket sizes, eight numbers of slots."""
    for step in range(40):
        bucket = round(4096 * 2 ** (step * 8 / 39) / 64) * 64
        for slots in range(1, 9):
            yield (
                {"params": 1_048_576},
                {"engine": "stream", "bucket_params": bucket, "staging_slots": slots},
            )


def head() -> Iterator[Point]:
    """306 points: a hundred and two strip heights, three ways round the ring."""
    for rows in sorted({*range(8, 129, 4), *range(132, 513, 5)})[:102]:
        for mode in ("activations", "weights", "gather"):
            yield (
                {"tokens_per_rank": 512, "hidden": 64, "vocab": 2048},
                {"ring_mode": mode, "strip_rows": rows},
            )


SPACES = {
    "dispatch": ("pipelined_llep", dispatch, 2),
    "optimizer": ("stream_adamw", optimizer, 1),
    "head": ("ring_dtp", head, 2),
}


def points_of(name: str, ranks: int) -> list[Point]:
    """Distinct points of a space in a fixed random order, shapes complete, configurations in their one spelling."""
    operator, space, _ = SPACES[name]
    adapter = load_adapter(operator)
    distinct: dict[str, Point] = {}
    for given, config in space():
        shape = adapter.shape(given, ranks)
        point = (shape, adapter.canonical(shape, config, ranks))
        distinct.setdefault(json.dumps(point, sort_keys=True), point)
    points = list(distinct.values())
    random.Random(0).shuffle(points)
    return points


def record(name: str, *, points: int, repeats: int, device: str, ranks: int | None, seconds: float) -> None:
    """Measure up to ``points`` points that are not in the file yet, for at most ``seconds``."""
    operator, _, usual = SPACES[name]
    ranks = ranks or usual
    adapter = load_adapter(operator)
    FOLDER.mkdir(parents=True, exist_ok=True)
    plain, packed = FOLDER / f"{name}.csv", FOLDER / f"{name}.csv.gz"
    if packed.exists() and not plain.exists():
        with gzip.open(packed, "rb") as source, plain.open("wb") as target:
            shutil.copyfileobj(source, target)
    done = _done(plain)
    until = time.monotonic() + seconds
    executor = LocalExecutor()
    failed = 0
    try:
        for shape, config in points_of(name, ranks)[:points]:
            if (_text(shape), _text(config)) in done:
                continue
            if time.monotonic() > until:
                break
            request = MeasureRequest(
                reference(operator), "flatpeak", shape, config, device=device, repeats=repeats
            )
            task = GangTask(
                "tuner.measure:measure_rank",
                request.payload(),
                ranks,
                device="cuda" if device == "cuda" else "cpu",
                timers=Timers(run_s=300.0),
            )
            outcome = executor.run(task)
            if not outcome.ok:
                failed += 1
                print(f"{name} {config}: {outcome.kind}, {outcome.reason.splitlines()[-1:]}")
                continue
            head = (adapter.name, "flatpeak", _text(config), _text(shape), ranks)
            tail = (local_hardware_id(device), adapter.version, commit())
            rows = [
                (*head, passed, rank, repeat, took, allocated, reserved, one["peak_source"], *tail)
                for rank, one in enumerate(outcome.results)
                for passed, repeat, took, allocated, reserved in one["samples"]
            ]
            frame = pd.DataFrame(rows, columns=list(COLUMNS))
            frame.to_csv(plain, mode="a", header=not plain.exists(), index=False, float_format="%.7g")
            done.add((_text(shape), _text(config)))
    finally:
        executor.close()
    if plain.exists():
        with plain.open("rb") as source, gzip.GzipFile(packed, "wb", mtime=0) as target:
            shutil.copyfileobj(source, target)
        plain.unlink()
    print(f"{name}: {len(done)} of {len(points_of(name, ranks))} points, {failed} failed now, {packed}")


def _done(path: Path) -> set[tuple[str, str]]:
    if not path.exists():
        return set()
    rows = pd.read_csv(path, usecols=["shape_json", "config_json"])
    return set(zip(rows["shape_json"], rows["config_json"], strict=True))


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def main() -> None:
    """Record the named sweeps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", choices=[[], *SPACES], help="default: all")
    parser.add_argument("--points", type=int, default=10_000, help="of each sweep; default: all of them")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, help="default: 2, and 1 for the optimizer")
    parser.add_argument("--seconds", type=float, default=1e9, help="most time for each sweep")
    args = parser.parse_args()
    for name in args.names or SPACES:
        record(
            name,
            points=args.points,
            repeats=args.repeats,
            device=args.device,
            ranks=args.ranks,
            seconds=args.seconds,
        )


if __name__ == "__main__":
    main()
