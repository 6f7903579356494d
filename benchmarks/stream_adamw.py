"""One optimizer step of every engine against the host link and CPU AdamW with its transfers.

    python -m benchmarks.stream_adamw --out rows.csv            # one H200, n = 1.6e9: about three minutes
    python -m benchmarks.stream_adamw --active-gpus 2           # as many GPUs of this host at once
    python -m benchmarks.stream_adamw --study split             # one GPU, two minutes: what split depends on
    python -m benchmarks.stream_adamw --tiny                    # a laptop, seconds

What limits it: ``stream`` moves 12 bytes a parameter each way, so its floor is ``12·n`` over the two-way rate of
the link, measured first, in the same run. ``host`` is limited by host memory. ``split`` shares that memory
between the two, which is why it gains less than the sum. Rates are those of this GPU while ``--active-gpus``
of them work at once: they share the host's memory.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from benchmarks.stream_adamw_bench import Barrier, Bench, Result, write
from benchmarks.stream_adamw_check import self_check
from benchmarks.stream_adamw_peers import Direction, deepspeed_adamw
from benchmarks.stream_adamw_study import split_study

_MIB, _GIB = 2**20, 2**30
_BETAS = (1, 2, 5, 10, 20, 50, 100, 400)
_SLOTS = (1, 2, 3, 5)
_SHARES = (0.1, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5)


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
    if options.study:
        return split_study(bench)
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
    parser.add_argument(
        "--study", choices=["split"], help="only what split depends on: shares, threads, buckets, memory"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--active-gpus", type=int, default=1, help="GPUs of this host that step at once")
    parser.add_argument("--staging-gib", type=float, default=24.0, help="leave out larger stagings")
    parser.add_argument("--link-seconds", type=float, default=0.4, help="time on each link rate")
    parser.add_argument("--threads", type=int, help="CPU threads a GPU (the usable cores, shared out)")
    parser.add_argument("--tiny", action="store_true", help="small, on the CPU")
    options = parser.parse_args(argv)
    if options.study and options.active_gpus > 1:
        parser.error("--study looks at one GPU")
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
        print("\n".join([*result.notes, *([] if options.study else table(result))]))
    return 0 if all(r.good for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
