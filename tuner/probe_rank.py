"""What one rank measures of its machine: matrix rate, memory rate, transfers by size, host link, AdamW rate.

All ranks run these together, in the same order, because that is how a training step loads the machine. Times
are medians over repeats; a size is given in bytes a rank sends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from operators.pinned_slab import PinnedSlab
from operators.ranks import Ranks

REPEATS = 5


@dataclass(frozen=True, slots=True)
class Point:
    """Seconds that one transfer of ``nbytes`` took."""

    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RankFigures:
    """Everything one rank measured. Rates are per rank while all ranks are busy."""

    gemm_flops: float
    memory_bytes_per_s: float
    all_to_all: tuple[Point, ...]
    ring: tuple[Point, ...]
    host_link_bytes_per_s: float
    host_link_alone_bytes_per_s: float | None
    """The same while no other rank copies; only rank 0 measures it, and only beside others."""
    adam_params_per_s: float


def transfer_sizes(device: torch.device) -> tuple[int, ...]:
    """Sizes worth measuring: from where latency rules to where bandwidth does."""
    top = 2**30 if device.type == "cuda" else 2**23
    return tuple(size for size in (2**12, 2**16, 2**18, 2**20, 2**23, 2**26, 2**28, 2**30) if size <= top)


def measure_rank(
    ranks: Ranks,
    device_name: str,
    sizes: Sequence[int] | None = None,
    on_part: Callable[[str], None] | None = None,
) -> RankFigures:
    """Measure this rank. A collective: every rank of the group calls it with the same arguments.

    ``on_part`` hears of each part before it is measured.
    """
    say = on_part or (lambda _part: None)
    device = torch.device(device_name, ranks.rank) if device_name == "cuda" else torch.device("cpu")
    sizes = tuple(sizes) if sizes is not None else transfer_sizes(device)
    say("matrix rate")
    gemm_flops = _gemm_flops(ranks, device)
    say("memory rate")
    memory_rate = _memory_rate(ranks, device)
    exchange, ring = [], []
    for nbytes in sizes:
        say(f"all-to-all and ring hop of {nbytes:,} bytes")
        exchange.append(Point(nbytes, _all_to_all_seconds(ranks, device, nbytes)))
        ring.append(Point(nbytes, _ring_seconds(ranks, device, nbytes)))
    say("host link")
    host_link = _host_link_rate(ranks, device, active=ranks.size)
    alone = _host_link_rate(ranks, device, active=1) if ranks.size > 1 else None
    say("AdamW on the host")
    return RankFigures(
        gemm_flops=gemm_flops,
        memory_bytes_per_s=memory_rate,
        all_to_all=tuple(exchange),
        ring=tuple(ring),
        host_link_bytes_per_s=host_link,
        host_link_alone_bytes_per_s=alone if ranks.rank == 0 else None,
        adam_params_per_s=_adam_rate(ranks),
    )


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _median_seconds(
    ranks: Ranks, device: torch.device, work: Callable[[], None], repeats: int = REPEATS
) -> float:
    work()
    seconds = []
    for _ in range(repeats):
        _sync(device)
        ranks.barrier()
        start = perf_counter()
        work()
        _sync(device)
        seconds.append(perf_counter() - start)
    return median(seconds)


def _gemm_flops(ranks: Ranks, device: torch.device) -> float:
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (768, torch.float32)
    left = torch.randn(n, n, device=device, dtype=dtype)
    right = torch.randn(n, n, device=device, dtype=dtype)
    out = torch.empty_like(left)

    def multiply() -> None:
        torch.mm(left, right, out=out)

    return 2.0 * n**3 / _median_seconds(ranks, device, multiply)


def _memory_rate(ranks: Ranks, device: torch.device) -> float:
    nbytes = 2**31 if device.type == "cuda" else 2**26
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    out = torch.empty_like(source)

    def copy() -> None:
        out.copy_(source)

    return 2.0 * nbytes / _median_seconds(ranks, device, copy)


def _all_to_all_seconds(ranks: Ranks, device: torch.device, nbytes: int) -> float:
    rows = max(1, nbytes // ranks.size)
    source = torch.ones(rows * ranks.size, 1, dtype=torch.uint8, device=device)
    out = torch.empty_like(source)
    splits = [rows] * ranks.size

    def exchange() -> None:
        ranks.all_to_all(out, source, splits, splits).wait()

    return _median_seconds(ranks, device, exchange)


def _ring_seconds(ranks: Ranks, device: torch.device, nbytes: int) -> float:
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    out = torch.empty_like(source)

    def hop() -> None:
        ranks.shift(source, out).wait()

    return _median_seconds(ranks, device, hop)


def _host_link_rate(ranks: Ranks, device: torch.device, active: int) -> float:
    """Bytes/s each way with both directions busy on ``active`` ranks (on CPU a plain copy stands for the link).

    Copies walk through more memory than caches hold: the same buffer again and again looks a third faster.
    """
    cuda = device.type == "cuda"
    nbytes, pieces = (2**28, 8) if cuda else (2**25, 2)
    with PinnedSlab(nbytes * pieces, pin=cuda) as slab:
        host = slab.buffer.view(pieces, nbytes)
        down, up = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
        lanes = [torch.cuda.Stream(device) for _ in range(2)] if cuda else []
        turn = 0

        def both_ways() -> None:
            nonlocal turn
            if ranks.rank >= active:
                return
            source, target = host[turn % pieces], host[(turn + pieces // 2) % pieces]
            turn += 1
            if not cuda:
                _both(source, down, up, target)
                return
            with torch.cuda.stream(lanes[0]):
                down.copy_(source, non_blocking=True)
            with torch.cuda.stream(lanes[1]):
                target.copy_(up, non_blocking=True)

        _sync(device)
        return nbytes / _median_seconds(ranks, device, both_ways)


def _both(host_in: Tensor, down: Tensor, up: Tensor, host_out: Tensor) -> None:
    down.copy_(host_in)
    host_out.copy_(up)


def _adam_rate(ranks: Ranks) -> float:
    """Parameters per second of torch's fused AdamW on this rank's share of the host."""
    n = 2**23  # well past the caches
    weight = torch.nn.Parameter(torch.ones(n))
    weight.grad = torch.ones(n)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return n / _median_seconds(ranks, torch.device("cpu"), optimizer.step)
