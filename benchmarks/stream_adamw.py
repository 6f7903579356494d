"""One optimizer step of every engine against the host link and CPU AdamW with its transfers.

    python -m benchmarks.stream_adamw --out rows.csv            # one H200, n = 1.6e9: about three minutes
    python -m benchmarks.stream_adamw --active-gpus 2           # as many GPUs of this host at once
    python -m benchmarks.stream_adamw --tiny                    # a laptop, seconds

What limits it: ``stream`` moves 12 bytes a parameter each way, so its floor is ``12·n`` over the two-way rate of
the link, measured first, in the same run. ``host`` is limited by host memory. ``split`` shares that memory
between the two, which is why it gains less than the sum. Rates are those of this GPU while ``--active-gpus``
of them work at once: they share the host's memory.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing as mp
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.stream_adamw_check import self_check
from benchmarks.stream_adamw_peers import (
    Direction,
    SerialCpuAdamW,
    deepspeed_adamw,
    link_seconds,
    synchronize,
)
from operators.bounds.stream_adamw import host_bytes
from operators.dry_run import PeakTracker
from operators.pinned_slab import PinnedSlab
from operators.stream_adamw import OPERATOR_VERSION, OffloadStreamAdamW

COLUMNS = [
    *("operator", "provider", "config_json", "shape_json", "pass", "rank", "repeat", "seconds"),
    *("allocated_bytes", "reserved_bytes", "peak_source", "hardware_id", "operator_version", "commit"),
]
_MIB, _GIB = 2**20, 2**30
_BETAS = (1, 2, 5, 10, 20, 50, 100, 400)
_SLOTS = (1, 2, 3, 5)
_SHARES = (0.1, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5)


class Barrier(Protocol):
    def wait(self) -> int: ...


@dataclass
class Row:
    """One configuration: what was run, every repeat, and the device bytes above weights and gradients."""

    provider: str
    config: dict[str, Any]
    seconds: list[float]
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    pass_: str = "step"

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass
class Result:
    """What one GPU measured."""

    rank: int
    params: int
    resident_bytes: int
    hardware_id: str
    peak_source: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    good: bool = True


class Bench:
    """Weights, gradients and one piece of host memory that every configuration borrows in turn."""

    def __init__(self, options: argparse.Namespace, rank: int, barrier: Barrier | None) -> None:
        self.options, self.rank, self.barrier = options, rank, barrier
        self.cuda = not options.tiny
        self.device = torch.device("cuda", rank) if self.cuda else torch.device("cpu")
        self.unit = 1_000_000 if self.cuda else 6_400
        torch.manual_seed(0)
        n = int(options.params)
        piece = 1 << 24 if self.cuda else 1 << 15
        sizes = [piece] * (n // piece) + ([n % piece] if n % piece else [])
        self.params = [
            torch.nn.Parameter((torch.randn(s, device=self.device) * 0.02).bfloat16()) for s in sizes
        ]
        for p in self.params:
            p.grad = torch.randn(p.shape, device=self.device, dtype=torch.bfloat16)
        self.result = Result(rank, n, 4 * n, _hardware_id(), "cuda" if self.cuda else "tracked")
        wanted = [
            SerialCpuAdamW.bytes_needed(self.params),
            host_bytes(params=n + 64, bucket_params=100 * self.unit, staging_slots=3, engine="host"),
        ]
        start = time.perf_counter()
        self.slab = PinnedSlab(max(wanted))
        taken = time.perf_counter() - start
        self.note(f"{torch.get_num_threads()} CPU threads")
        self.note(f"{self.slab.locked_bytes / _GIB:.1f} GiB of host memory in {taken:.1f} s")

    def note(self, text: str) -> None:
        self.result.notes.append(text)
        print(f"[{self.rank}] {text}", file=sys.stderr, flush=True)

    def link(self, direction: Direction, copy_bytes: int) -> Row:
        self._meet()
        seconds = link_seconds(
            self.slab.buffer, self.device, direction, copy_bytes, self.options.link_seconds
        )
        row = Row("link", {"direction": direction, "copy_bytes": copy_bytes}, [seconds], pass_="copy")
        self.result.rows.append(row)
        return row

    def engine(self, provider: str, **config: Any) -> Row:
        """One configuration of ours: two steps to warm up, then the repeats, each waited for to its end."""
        kernel = config.pop("host_kernel", "auto")
        tracker = PeakTracker()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        on_card = config["engine"] == "device"
        optimizer = OffloadStreamAdamW(
            self.params,
            lr=1e-4,
            **config,
            host_kernel=kernel,
            host_memory=None if on_card else self.slab.buffer,
        )
        row = Row(provider, {**config, "host_kernel": kernel}, self._time(optimizer.step))
        if self.cuda:
            row.allocated_bytes = torch.cuda.max_memory_allocated(self.device) - before
            row.reserved_bytes = torch.cuda.max_memory_reserved(self.device)
        else:
            with tracker:
                optimizer.step()
            row.allocated_bytes = optimizer.staging_bytes + tracker.peak_bytes
        self.result.rows.append(row)
        self.note(f"{provider} {row.config}: {row.median * 1e3:.1f} ms")
        return row

    def serial(self, provider: str, maker: Callable[..., Any] | None) -> Row:
        peer = SerialCpuAdamW(self.params, self.slab.buffer, maker)
        row = Row(provider, {"engine": "host", "transfers": "serial"}, self._time(peer.step))
        self.result.rows.append(row)
        self.note(f"{provider} serial: {row.median * 1e3:.1f} ms")
        return row

    def _time(self, step: Callable[[], Any]) -> list[float]:
        for _ in range(2):
            step()
        seconds = []
        for _ in range(self.options.repeats):
            synchronize(self.device)
            self._meet()
            start = time.perf_counter()
            step()
            synchronize(self.device)
            seconds.append(time.perf_counter() - start)
        return seconds

    def _meet(self) -> None:
        if self.barrier is not None:
            self.barrier.wait()


def measure(bench: Bench) -> Result:
    """Link first, then peers, then every engine."""
    options, unit = bench.options, bench.unit
    copies = (_MIB, 12 * unit, 16 * _MIB, 12 * 10 * unit, 1024 * _MIB) if bench.cuda else (12 * unit,)
    directions: tuple[Direction, ...] = ("in", "out", "both")
    for copy_bytes in copies:
        for direction in directions:
            bench.link(direction, copy_bytes)
    alone = options.active_gpus == 1
    betas = _BETAS if alone else (5, 10, 20)
    for beta in betas if bench.cuda else (1, 10):
        # the extremes need not be crossed: one slot and five tell their tale at a few sizes
        slots = _SLOTS if beta in {1, 5, 10, 100} and alone else (2, 3)
        for s in slots:
            if 16 * s * beta * unit <= options.staging_gib * _GIB:
                bench.engine("flatpeak", engine="stream", bucket_params=beta * unit, staging_slots=s)
    good = {"bucket_params": 10 * unit, "staging_slots": 3}
    bench.engine("host", engine="host", host_kernel="plain", **good)
    bench.engine("flatpeak", engine="host", **good)
    if alone:
        bench.engine("flatpeak", engine="host", bucket_params=50 * unit, staging_slots=3)
    for share in _SHARES if alone else (0.25, 0.35):
        bench.engine("flatpeak", engine="split", host_share=share, **good)
    if alone:
        bench.engine("flatpeak", engine="device", bucket_params=10 * unit, staging_slots=1)
        bench.serial("torch", None)
        maker = deepspeed_adamw()
        if isinstance(maker, str):
            bench.note(f"DeepSpeed's CPUAdam cannot be used here ({maker})")
        else:
            bench.serial("deepspeed", maker)
    return bench.result


def table(result: Result) -> list[str]:
    """Rates, then a line a configuration against the floor; then the three ratios that matter."""
    n = result.params
    lines = [f"GPU {result.rank}: n = {n:.3g}, {result.hardware_id}"]
    links = [row for row in result.rows if row.provider == "link"]
    for row in links:
        rate = row.config["copy_bytes"] / row.median / 1e9
        both = " each way" if row.config["direction"] == "both" else ""
        lines.append(
            f"  link {row.config['direction']:>4} {row.config['copy_bytes'] / _MIB:>8.2f} MiB {rate:>7.1f} GB/s{both}"
        )
    two_way = max(r.config["copy_bytes"] / r.median for r in links if r.config["direction"] == "both")
    floor = 12 * n / two_way
    lines.append(f"  floor of the stream, 12n each way at {two_way / 1e9:.1f} GB/s: {floor * 1e3:.1f} ms")
    lines.append(
        f"  {'provider':>9} {'engine':>7} {'kernel':>7} {'beta':>10} {'s':>2} {'share':>5} {'ms':>8} "
        f"{'of floor':>8} {'GiB':>7}"
    )
    steps = [row for row in result.rows if row.pass_ == "step"]
    for row in steps:
        c = row.config
        kernel = c.get("host_kernel", "-") if c["engine"] in {"host", "split"} else "-"
        lines.append(
            f"  {row.provider:>9} {c['engine']:>7} {kernel:>7} {c.get('bucket_params', 0):>10} "
            f"{c.get('staging_slots', 0):>2} {c.get('host_share', 0.0):>5} {row.median * 1e3:>8.1f} "
            f"{floor / row.median:>8.3f} {row.allocated_bytes / _GIB:>7.3f}"
        )
    if result.peak_source != "cuda":
        lines.append(
            "  (on the CPU a transfer is a copy of ordinary memory: what follows says nothing of a link)"
        )
    ours = [row for row in steps if row.provider == "flatpeak"]
    stream = [r for r in ours if r.config["engine"] == "stream" and r.allocated_bytes <= 0.5 * _GIB]
    best_stream = min(stream, key=lambda r: r.median)
    lines.append(
        f"  stream, <= 0.5 GiB of staging: {floor / best_stream.median:.3f} of the two-way link {best_stream.config}"
    )
    cpu = [r for r in steps if r.provider in {"torch", "host", "deepspeed"}]
    if cpu:
        rival = min(cpu, key=lambda r: r.median)
        lines.append(
            f"  stream against the best CPU AdamW ({rival.provider}): {rival.median / best_stream.median:.2f}x faster"
        )
    split = min((r for r in ours if r.config["engine"] == "split"), key=lambda r: r.median)
    alone = min((r for r in ours if r.config["engine"] in {"stream", "host"}), key=lambda r: r.median)
    gain = alone.median / split.median
    verdict = "it pays" if gain > 1.02 else "it does not pay here: choose the better alone"
    lines.append(f"  split at {split.config['host_share']}: {gain:.2f}x of the better alone; {verdict}")
    return lines


def write(path: Path, results: list[Result], active_gpus: int) -> None:
    """Append samples in the project's form, one a repeat."""
    commit, new = _commit(), not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(COLUMNS)
        for result in results:
            shape = {"params": result.params, "dtype": "bfloat16", "resident_bytes": result.resident_bytes}
            for row in result.rows:
                config = {**row.config, "active_gpus": active_gpus}
                for repeat, seconds in enumerate(row.seconds):
                    writer.writerow(
                        [
                            "stream_adamw",
                            row.provider,
                            json.dumps(config),
                            json.dumps(shape),
                            row.pass_,
                            result.rank,
                            repeat,
                            f"{seconds:.9f}",
                            row.allocated_bytes,
                            row.reserved_bytes,
                            result.peak_source,
                            result.hardware_id,
                            OPERATOR_VERSION,
                            commit,
                        ]
                    )


def _hardware_id() -> str:
    try:
        from tuner.fingerprint import local_hardware_id
    except ImportError:  # the base install has torch only
        return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return local_hardware_id()


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def usable_cores() -> int:
    """Cores this process may use: its affinity, or a container's quota if that is less."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return cores


_barrier: Barrier | None = None


def _share_barrier(barrier: Barrier) -> None:
    global _barrier  # noqa: PLW0603 - how a pool hands one to its processes
    _barrier = barrier


def _one_gpu(rank: int, options: argparse.Namespace) -> Result:
    if not options.tiny:
        torch.cuda.set_device(rank)
    torch.set_num_threads(
        options.threads or (1 if options.tiny else max(1, usable_cores() // options.active_gpus))
    )
    bench = Bench(options, rank, _barrier)
    if rank == 0:
        bench.result.good, lines = self_check(bench.device)
        for line in lines:
            bench.note(line)
    return measure(bench)


def main(argv: list[str] | None = None) -> int:
    """Exit 1 if the self-check fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="append samples to this CSV")
    parser.add_argument("--params", type=float, help="parameters a GPU (1.6e9; 2e6 with --tiny)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--active-gpus", type=int, default=1, help="GPUs of this host that step at once")
    parser.add_argument("--staging-gib", type=float, default=24.0, help="leave out larger stagings")
    parser.add_argument("--link-seconds", type=float, default=0.4, help="time on each link rate")
    parser.add_argument("--threads", type=int, help="CPU threads a GPU (the usable cores, shared out)")
    parser.add_argument("--tiny", action="store_true", help="small, on the CPU")
    options = parser.parse_args(argv)
    if options.tiny:
        options.active_gpus, options.link_seconds = 1, 0.02
    elif torch.cuda.device_count() < options.active_gpus:
        parser.error(
            f"--active-gpus {options.active_gpus}, but {torch.cuda.device_count()} are here (--tiny needs none)"
        )
    options.params = options.params or (2e6 if options.tiny else 1.6e9)

    gpus = options.active_gpus
    if gpus == 1:
        results = [_one_gpu(0, options)]
    else:
        context = mp.get_context("spawn")
        # A process that fails breaks the barrier for the others instead of leaving them there.
        barrier = context.Barrier(gpus, timeout=300)
        with ProcessPoolExecutor(gpus, context, _share_barrier, (barrier,)) as pool:
            results = list(pool.map(_one_gpu, range(gpus), [options] * gpus))
    if options.out is not None:
        write(options.out, results, options.active_gpus)
    for result in results:
        print("\n".join([*result.notes, *table(result)]))
    return 0 if all(r.good for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
