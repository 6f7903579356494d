"""What the ranks of benchmarks/two_gpus.py run: links, library memory, overlap, checks, latency modes.

Every function is ``f(ranks, payload) -> JSON`` and a collective: all ranks call it with the same payload. Times
are CUDA events around work that all ranks begin at the same moment (wall clock on a CPU).
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.rank_gang import join
from benchmarks.stream_adamw_peers import Direction, link_seconds
from operators.pinned_slab import PinnedSlab
from operators.ranks import Pending, ProcessRanks, Ranks
from tuner.registry import Runnable, load_adapter

MIB = 2**20
Group = ProcessRanks


def _device() -> torch.device:
    if dist.is_initialized() and dist.get_backend() == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(ranks: Ranks, device: torch.device, work: Callable[[], None]) -> float:
    """Seconds of ``work``, begun by all ranks together."""
    _sync(device)
    ranks.barrier()
    _sync(device)
    if device.type != "cuda":
        began = perf_counter()
        work()
        return perf_counter() - began
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


# ---------------------------------------------------------------------------------------------- library memory


def library_memory(_none: Group | None, payload: dict[str, Any]) -> dict[str, int]:
    """Device bytes outside torch's allocator after each first use. The group is formed here, step by step."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    used: dict[str, int] = {}
    if payload["device"] == "cpu":
        join(rank, size, "cpu", payload["store"])
        return used
    device = torch.device("cuda", rank)

    def note(name: str) -> None:
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        used[name] = total - free - torch.cuda.memory_reserved(device)

    small = torch.zeros(MIB, dtype=torch.uint8, device=device)
    note("context")
    square = torch.ones(2048, 2048, device=device, dtype=torch.bfloat16)
    torch.mm(square, square)
    note("first_matmul")
    ranks = join(rank, size, "cuda", payload["store"])
    note("group")
    dist.all_reduce(small)
    note("first_all_reduce")
    dist.all_reduce(torch.zeros(256 * MIB, dtype=torch.uint8, device=device))
    note("all_reduce_256_mib")
    out = torch.empty_like(small)
    dist.all_to_all_single(out, small)
    note("first_all_to_all")
    large = torch.zeros(512 * MIB, dtype=torch.uint8, device=device)
    dist.all_to_all_single(torch.empty_like(large), large)
    note("all_to_all_512_mib")
    ranks.shift(small, out).wait()
    note("first_ring_hop")
    ranks.shift(large, torch.empty_like(large)).wait()
    note("ring_hop_512_mib")
    gathered = torch.empty(size * small.numel(), dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(gathered, small)
    note("first_all_gather")
    return used


# ------------------------------------------------------------------------------------------------------- links


def link_curves(ranks: Group, payload: dict[str, Any]) -> dict[str, list[list[float]]]:
    """``[bytes a rank holds, seconds of one operation in a row, seconds of one alone]`` by operation.

    All-to-all and ring hop: bytes a rank sends (its own share of an all-to-all included). All-gather and
    all-reduce: bytes a rank brings.
    """
    device = _device()
    found: dict[str, list[list[float]]] = {}
    for nbytes in payload["sizes"]:
        rows = nbytes // ranks.size
        source = torch.ones(rows * ranks.size, 1, dtype=torch.uint8, device=device)
        out, splits = torch.empty_like(source), [rows] * ranks.size
        whole = torch.empty(ranks.size * source.numel(), dtype=torch.uint8, device=device)
        flat = source.flatten()
        operations: dict[str, Callable[[], None]] = {
            "all_to_all": lambda a=out, b=source, s=splits: ranks.all_to_all(a, b, s, s).wait(),  # type: ignore[misc]
            "ring": lambda a=out, b=source: ranks.shift(b, a).wait(),  # type: ignore[misc]
            "all_gather": lambda a=whole, b=flat: dist.all_gather_into_tensor(a, b),  # type: ignore[misc]
            "all_reduce": lambda b=flat: dist.all_reduce(b, op=dist.ReduceOp.MAX),  # type: ignore[misc]
        }
        in_a_row = 20 if nbytes <= 4 * MIB else 4
        for name, operation in operations.items():
            operation()
            alone = median(timed(ranks, device, operation) for _ in range(payload["repeats"]))
            row = median(
                timed(ranks, device, partial(_in_a_row, operation, in_a_row)) / in_a_row
                for _ in range(payload["repeats"])
            )
            found.setdefault(name, []).append([nbytes, row, alone])
        del operations, source, out, whole, flat
    return found


def _in_a_row(operation: Callable[[], None], times: int) -> None:
    for _ in range(times):
        operation()


def host_links(ranks: Group, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Bytes/s each way over the host link, by copy size, direction and how many GPUs of the host copy at once."""
    device = _device()
    slab = PinnedSlab(payload["slab_bytes"])
    rows: list[dict[str, Any]] = []
    directions: tuple[Direction, ...] = ("in", "out", "both")
    for active in range(1, ranks.size + 1):
        for copy_bytes in payload["sizes"]:
            for direction in directions:
                ranks.barrier()
                if ranks.rank < active:
                    seconds = link_seconds(slab.buffer, device, direction, copy_bytes, payload["seconds"])
                    rows.append(
                        {
                            "active": active,
                            "rank": ranks.rank,
                            "direction": direction,
                            "copy_bytes": copy_bytes,
                            "bytes_per_s": copy_bytes / seconds,
                        }
                    )
                ranks.barrier()
    slab.close()
    return rows


# ----------------------------------------------------------------------------------------------------- overlap


def overlap(ranks: Group, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Compute alone, a transfer alone, both at once: ``hidden`` is the share of the shorter one that costs nothing."""
    device = _device()
    cuda = device.type == "cuda"
    n = payload["matrix"]
    dtype = torch.bfloat16 if cuda else torch.float32
    left, right = torch.randn(2, n, n, device=device, dtype=dtype).unbind()
    product = torch.empty_like(left)
    stream_in = torch.ones(payload["sweep_bytes"], dtype=torch.uint8, device=device)
    stream_out = torch.empty_like(stream_in)
    nbytes = payload["transfer_bytes"]
    source = torch.ones(nbytes, 1, dtype=torch.uint8, device=device)
    out, splits = torch.empty_like(source), [nbytes // ranks.size] * ranks.size
    slab = PinnedSlab(2 * nbytes)
    host_in, host_out = slab.buffer[:nbytes], slab.buffer[nbytes : 2 * nbytes]
    lanes = [torch.cuda.Stream(device) for _ in range(2)] if cuda else []

    def matmul() -> None:
        for _ in range(payload["matmuls"]):
            torch.mm(left, right, out=product)

    def memory() -> None:
        for _ in range(payload["sweeps"]):
            stream_out.copy_(stream_in)

    def host_copy(ways: tuple[str, ...]) -> Pending:
        if not cuda:
            source.view(-1).copy_(host_in)
            return _Nothing()
        for lane, way in zip(lanes, ("in", "out"), strict=True):
            if way not in ways:
                continue
            lane.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(lane):
                if way == "in":
                    out.view(-1).copy_(host_in, non_blocking=True)
                else:
                    host_out.copy_(source.view(-1), non_blocking=True)
        return _Lanes(lanes)

    transfers: dict[str, Callable[[], Pending]] = {
        "all_to_all": lambda: ranks.all_to_all(out, source, splits, splits),
        "ring": lambda: ranks.shift(source, out),
        "host_in": lambda: host_copy(("in",)),
        "host_both": lambda: host_copy(("in", "out")),
    }
    rows = []
    for compute_name, compute in (("matmul", matmul), ("memory", memory)):
        compute()
        alone_c = median(timed(ranks, device, compute) for _ in range(payload["repeats"]))
        for transfer_name, transfer in transfers.items():
            counts = payload["counts"] if transfer_name in ("all_to_all", "ring") else payload["host_counts"]
            for count in counts:

                def moves(count: int = count, one: Callable[[], Pending] = transfer) -> None:
                    for pending in [one() for _ in range(count)]:
                        pending.wait()

                def both(
                    count: int = count,
                    one: Callable[[], Pending] = transfer,
                    work: Callable[[], None] = compute,
                ) -> None:
                    under_way = [one() for _ in range(count)]
                    work()
                    for pending in under_way:
                        pending.wait()

                moves()
                alone_t = median(timed(ranks, device, moves) for _ in range(payload["repeats"]))
                together = median(timed(ranks, device, both) for _ in range(payload["repeats"]))
                rows.append(
                    {
                        "compute": compute_name,
                        "transfer": transfer_name,
                        "bytes": nbytes * count,
                        "compute_s": alone_c,
                        "transfer_s": alone_t,
                        "together_s": together,
                        "hidden": (alone_c + alone_t - together) / min(alone_c, alone_t),
                    }
                )
    slab.close()
    return rows


class _Nothing:
    def wait(self) -> None:
        return


class _Lanes:
    def __init__(self, lanes: list[torch.cuda.Stream]) -> None:
        self._lanes = lanes

    def wait(self) -> None:
        for lane in self._lanes:
            torch.cuda.current_stream().wait_stream(lane)


# ------------------------------------------------------------------------------------------------------ checks


def checks(ranks: Group, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """One operator, several configurations, over the group against one process's dense reference in float64."""
    adapter = load_adapter(payload["operator"])
    rows = []
    for case in payload["cases"]:
        shape = adapter.shape(case["shape"], ranks.size)
        error, tolerance = adapter.reference_check(
            shape, case["config"], ranks, payload["device"], "flatpeak"
        )
        rows.append({**case, "error": error, "tolerance": tolerance, "good": error <= tolerance})
    return rows


# ------------------------------------------------------------------------------------------------------- modes


def modes(ranks: Group, payload: dict[str, Any]) -> dict[str, Any]:
    """Many repeats of one configuration, with what the host did in each: time to queue, syncs, device allocations.

    ``apart``: forward and backward timed one by one, ``together``: with no synchronisation between them.
    """
    device = _device()
    adapter = load_adapter(payload["operator"])
    shape = adapter.shape(payload["shape"], ranks.size)
    runnable = adapter.build(shape, payload["config"], ranks, device.type, "flatpeak")
    if device.type == "cuda":
        torch.cuda.empty_cache()
    passes = dict(runnable.passes)
    for _ in range(2):
        runnable.forward_backward()
    syncs = {name: _syncs(runnable, name, device) for name in passes}
    rows: list[dict[str, Any]] = []
    for repeat in range(payload["repeats"]):
        runnable.reset()
        for name, run in passes.items():
            rows.append({"how": "apart", "pass": name, "repeat": repeat, **_watched(ranks, device, run)})
    for repeat in range(payload["repeats"]):
        runnable.reset()
        watched = _watched(ranks, device, partial(_one_by_one, list(passes.values())))
        rows.append({"how": "together", "pass": "forward_backward", "repeat": repeat, **watched})
    del runnable, passes
    gc.collect()
    return {"syncs": syncs, "rows": rows}


def _one_by_one(passes: list[Callable[[], None]]) -> None:
    for run in passes:
        run()


def _watched(ranks: Group, device: torch.device, run: Callable[[], None]) -> dict[str, Any]:
    before = _allocator(device)
    collected = sum(entry["collections"] for entry in gc.get_stats())
    host = 0.0

    def work() -> None:
        nonlocal host
        began = perf_counter()
        run()
        host = perf_counter() - began

    seconds = timed(ranks, device, work)
    after = _allocator(device)
    row: dict[str, Any] = {"seconds": seconds, "host_s": host}
    row |= {key: after[key] - before[key] for key in after}
    row["collections"] = sum(entry["collections"] for entry in gc.get_stats()) - collected
    if device.type == "cuda":
        with suppress(Exception):  # needs the management library
            row["clock_mhz"] = torch.cuda.clock_rate(device)
        with suppress(Exception):
            row["power_w"] = torch.cuda.power_draw(device) / 1e3
    return row


def _allocator(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    keys = ("num_device_alloc", "num_device_free", "num_alloc_retries", "num_sync_all_streams")
    return {key: int(stats.get(key, 0)) for key in keys}


def _syncs(runnable: Runnable, name: str, device: torch.device) -> int:
    """Synchronising calls that torch itself makes in one pass (0 on a CPU)."""
    if device.type != "cuda":
        runnable.forward_backward()
        return 0
    runnable.reset()
    for earlier, run in runnable.passes.items():
        if earlier == name:
            break
        run()
    torch.cuda.synchronize(device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            runnable.passes[name]()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize(device)
    return sum("synchroniz" in str(one.message) for one in caught)


# ----------------------------------------------------------------------------------------------------- measure


def grow_host_memory(ranks: Group, payload: dict[str, Any]) -> float:
    """Write ``bytes`` of host memory once, and give them back: a virtual machine may be given memory as it is used."""
    began = perf_counter()
    block = torch.empty(payload["bytes"], dtype=torch.uint8)
    block.fill_(1)
    del block
    ranks.barrier()
    return perf_counter() - began


def measure(ranks: Group, payload: dict[str, Any]) -> dict[str, Any]:
    """One configuration as a sweep's trial measures it."""
    from tuner.measuring.measure import measure_rank

    return measure_rank(ranks, payload["request"], lambda _progress: None)
