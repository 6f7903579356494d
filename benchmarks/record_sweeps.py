"""Record exhaustive sweeps: every point of a space measured, for strategies to be compared on (`flatpeak replay`).

    python -m benchmarks.record_sweeps --label two-cores                     # all of them, on the CPU
    python -m benchmarks.record_sweeps dispatch --label two-cores --points 40
    python -m benchmarks.record_sweeps --device cuda --loopback 8 --label h200-x1
    python -m benchmarks.record_sweeps --device cuda --ranks 2 --label h200-x2
    python -m benchmarks.record_sweeps dispatch head --hosts 100mbit --label two-hosts   # two namespaces, as root

Three spaces, at least 300 points each: the dispatch over (N, routing profile, K, schedule), the optimizer's bucket
size × staging slots, the head's strip rows × ring mode. On the CPU shapes are small, so that two cores do it in
minutes; on a GPU a layer has its real width. Each point has ``--repeats`` repeats in each of ``--rounds`` launches.
Rows go to ``benchmarks/results/replay/recorded/NAME-LABEL.csv.gz`` in the samples' columns; a run that was stopped
goes on where it was, and points are visited in a random order, so that a part of them is a sample.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.netns import Hosts
from tuner.executors.base import GangTask, Timers
from tuner.executors.choice import make_executor
from tuner.machine.fingerprint import commit
from tuner.measuring.measure import MeasureRequest
from tuner.registry import load_adapter, reference
from tuner.space import Config

FOLDER = Path(__file__).parent / "results" / "replay" / "recorded"
COLUMNS = (
    "operator", "provider", "config_json", "shape_json", "ranks", "pass", "rank", "repeat", "seconds",
    "allocated_bytes", "reserved_bytes", "peak_source", "hardware_id", "operator_version", "commit",
)  # fmt: skip
Point = tuple[dict[str, Any], Config]


@dataclass(frozen=True)
class Machine:
    """What shapes are made for."""

    cuda: bool
    ranks: int


def dispatch(machine: Machine) -> Iterator[Point]:
    """306 points: three N, three routers, twelve K, three schedules (one where K = 1)."""
    if machine.cuda:
        sizes, layer = (
            (1024, 4096, 16384),
            {"hidden": 7168, "intermediate": 2048, "top_k": 8, "dtype": "bfloat16"},
        )
        experts, min_rows, profiles = (
            16 * machine.ranks,
            1024,
            ("balanced", f"skew:80/{2 * machine.ranks}", "random"),
        )
    else:
        sizes, layer = (1024, 2048, 4096), {"hidden": 64, "intermediate": 64, "top_k": 2, "dtype": "float32"}
        experts, min_rows, profiles = 8, 16, ("balanced", "skew:80/2", "one_hot")
    for tokens in sizes:
        for profile in profiles:
            shape = layer | {
                "tokens_per_rank": tokens, "experts": experts, "profile": profile, "min_rows": min_rows
            }  # fmt: skip
            for chunks in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64):
                for schedule in ("serial", "prefetch", "overlap"):
                    yield shape, {"chunks": chunks, "dispatch_schedule": schedule}


def optimizer(machine: Machine) -> Iterator[Point]:
    """320 points: forty bucket sizes, eight numbers of slots."""
    params = 2**26 if machine.cuda else 2**20
    for step in range(40):
        bucket = round(params / 256 * 2 ** (step * 8 / 39) / 64) * 64
        for slots in range(1, 9):
            yield (
                {"params": params, "dtype": "bfloat16" if machine.cuda else "float32"},
                {"engine": "stream", "bucket_params": bucket, "staging_slots": slots},
            )


def head(machine: Machine) -> Iterator[Point]:
    """306 points: a hundred and two strip heights, three ways round the ring."""
    if machine.cuda:
        shape = {"tokens_per_rank": 4096, "hidden": 4096, "vocab": 131072, "dtype": "bfloat16"}
        heights = [round(128 * 32 ** (step / 101)) for step in range(102)]
    else:
        shape = {"tokens_per_rank": 1024, "hidden": 128, "vocab": 2048, "dtype": "float32"}
        heights = [round(32 * 32 ** (step / 101)) for step in range(102)]
    for rows in heights:
        for mode in ("activations", "weights", "gather"):
            yield shape, {"ring_mode": mode, "strip_rows": rows}


SPACES = {
    "dispatch": ("pipelined_llep", dispatch, 2),
    "optimizer": ("stream_adamw", optimizer, 1),
    "head": ("ring_dtp", head, 2),
}


def points_of(name: str, machine: Machine) -> list[Point]:
    """Distinct points of a space in a fixed random order, shapes complete, configurations in their one spelling."""
    operator, space, _ = SPACES[name]
    adapter = load_adapter(operator)
    distinct: dict[str, Point] = {}
    for given, config in space(machine):
        shape = adapter.shape(given, machine.ranks)
        point = (shape, adapter.canonical(shape, config, machine.ranks))
        distinct.setdefault(json.dumps(point, sort_keys=True), point)
    points = list(distinct.values())
    random.Random(0).shuffle(points)
    return points


def record(name: str, args: argparse.Namespace) -> int:
    """Measure points that are not in the file yet, within ``args.points`` and ``args.seconds``; how many failed."""
    operator, _, usual = SPACES[name]
    device: str = args.device
    # the optimizer talks to nobody: it has no peers to stand in for
    loopback: int | None = args.loopback if operator != "stream_adamw" else None
    ranks = 1 if args.loopback else args.ranks or usual
    points = points_of(name, Machine(device == "cuda", loopback or ranks))
    beside: dict[str, Any] = {}
    if loopback is not None:
        beside = {"ranks": loopback, "loopback": True}
    elif args.nodes > 1:
        beside = {"ranks": ranks, "nodes": args.nodes}
    adapter = load_adapter(operator)
    folder: Path = args.out
    folder.mkdir(parents=True, exist_ok=True)
    plain, packed = folder / f"{name}-{args.label}.csv", folder / f"{name}-{args.label}.csv.gz"
    if packed.exists() and not plain.exists():
        half = plain.with_suffix(".half")
        with gzip.open(packed, "rb") as source, half.open("wb") as target:
            shutil.copyfileobj(source, target)
        half.replace(plain)
    kept = _kept(plain)
    if any(count % args.repeats for count in kept.values()):
        raise SystemExit(f"{packed} has launches of another number of repeats: give it with --repeats")
    until = time.monotonic() + args.seconds
    executor = make_executor("ray" if args.ray_address else "local", args.ray_address)
    failed = 0
    # a launch has its luck too (where memory came to lie): later rounds launch every point once more, in another order
    visits: list[tuple[int, Point]] = [
        (number, one) for number in range(args.rounds) for one in _shuffled(points[: args.points], number)
    ]
    try:
        for number, (shape, config) in visits:
            stored = shape | beside
            point = (_text(stored), _text(config))
            if kept.get(point, 0) > number * args.repeats:
                continue
            if time.monotonic() > until:
                break
            request = MeasureRequest(
                reference(operator),
                "flatpeak",
                shape,
                config,
                device=device,
                repeats=args.repeats,
                loopback=loopback,
            )
            here = executor.site(device, args.nodes).hardware_id
            task = GangTask(
                "tuner.measuring.measure:measure_rank",
                request.payload(),
                ranks,
                device="cuda" if device == "cuda" else "cpu",
                nodes=args.nodes,
                timers=Timers(run_s=300.0),
                hardware_id=here,
            )
            outcome = executor.run(task)
            if not outcome.ok:
                failed += 1
                print(f"{name} {config}: {outcome.kind}, {outcome.reason.splitlines()[-1:]}")
                continue
            first = kept.get(point, 0)
            head = (adapter.name, "flatpeak", point[1], point[0], ranks)
            tail = (here, adapter.version, commit())
            rows = [
                (*head, passed, rank, first + repeat, took, allocated, reserved, one["peak_source"], *tail)
                for rank, one in enumerate(outcome.results)
                for passed, repeat, took, allocated, reserved in one["samples"]
            ]
            frame = pd.DataFrame(rows, columns=list(COLUMNS))
            frame.to_csv(plain, mode="a", header=not plain.exists(), index=False, float_format="%.7g")
            kept[point] = first + args.repeats
    finally:
        executor.close()
    if plain.exists():
        with plain.open("rb") as source, gzip.GzipFile(packed, "wb", mtime=0) as target:
            shutil.copyfileobj(source, target)
        plain.unlink()
    print(f"{name}: {len(kept)} of {len(points)} points, {failed} failed now, {packed}")
    return failed


def _kept(path: Path) -> dict[tuple[str, str], int]:
    """How many repeats of every point there are."""
    if not path.exists():
        return {}
    text = path.read_bytes()
    if not text.endswith(b"\n"):  # a kill cut the last row short
        path.write_bytes(text[: text.rfind(b"\n") + 1])
    rows = pd.read_csv(path, usecols=["shape_json", "config_json", "repeat"])
    most = rows.groupby(["shape_json", "config_json"], as_index=False)["repeat"].max()
    points = zip(most["shape_json"], most["config_json"], strict=True)
    return {point: int(last) + 1 for point, last in zip(points, most["repeat"], strict=True)}


def _shuffled(points: list[Point], number: int) -> list[Point]:
    """The points of a round: the first as they come, later ones in orders of their own."""
    return points if number == 0 else random.Random(number).sample(points, len(points))


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _on_two_hosts(args: argparse.Namespace) -> None:
    """This command again, in one of two network namespaces, on the Ray cluster of both."""
    out: Path = args.out
    command = [sys.executable, "-m", "benchmarks.record_sweeps", *args.names, "--label", args.label]
    command += ["--repeats", str(args.repeats), "--rounds", str(args.rounds)]
    command += ["--seconds", str(args.seconds), "--points", str(args.points)]
    with Hosts(args.hosts) as hosts:
        command += [
            "--ranks",
            "2",
            "--nodes",
            "2",
            "--ray-address",
            hosts.address,
            "--out",
            str(out.resolve()),
        ]
        done = hosts.run(command, timeout_s=3 * args.seconds + 600 if math.isfinite(args.seconds) else None)
    print(done.stdout[-2000:], done.stderr[-2000:] if done.returncode else "", sep="")
    raise SystemExit(done.returncode)


def _wrong(args: argparse.Namespace) -> str | None:
    """What is wrong with the options, before anything is measured."""
    least = {"points": 1, "repeats": 1, "rounds": 1, "nodes": 1, "ranks": 1, "loopback": 1}
    low = [
        name for name, value in least.items() if (given := getattr(args, name)) is not None and given < value
    ]
    if low or not args.seconds > 0:
        return f"--{low[0] if low else 'seconds'} is too small"
    if not re.fullmatch(r"[\w.-]+", args.label):
        return f"--label is part of a file's name: letters, digits, ., _ and - (got {args.label!r})"
    if args.hosts and (
        args.device != "cpu" or args.loopback or args.ranks or args.nodes > 1 or args.ray_address
    ):
        return "--hosts brings its own ranks, nodes and Ray cluster, on the CPU"
    if args.nodes > 1 and not args.ray_address:
        return "--nodes needs a Ray cluster (--ray-address), or --hosts"
    return None


def main() -> None:
    """Record the named sweeps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", choices=[[], *SPACES], help="default: all")
    parser.add_argument("--points", type=int, default=10_000, help="of each sweep; default: all of them")
    parser.add_argument("--repeats", type=int, default=5, help="of a launch")
    parser.add_argument("--rounds", type=int, default=1, help="launches of every point")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, help="default: 2, and 1 for the optimizer")
    parser.add_argument("--seconds", type=float, default=math.inf, help="most time for each sweep")
    parser.add_argument("--loopback", type=int, help="one rank plays its part in a group of so many")
    parser.add_argument("--label", required=True, help="the machine, in the file's name")
    parser.add_argument("--out", type=Path, default=FOLDER, help=f"default: {FOLDER.name}")
    parser.add_argument(
        "--nodes", type=int, default=1, help="the ranks stand evenly on so many (--ray-address)"
    )
    parser.add_argument("--ray-address", help="of a Ray cluster; default: ranks of this machine")
    parser.add_argument("--hosts", metavar="RATE", help="on two hosts of its own, joined at this rate")
    args = parser.parse_args()
    if (wrong := _wrong(args)) is not None:
        parser.error(wrong)
    if args.hosts:
        _on_two_hosts(args)
        return
    if sum(record(name, args) for name in args.names or SPACES):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
