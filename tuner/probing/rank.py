"""What one rank measures of its machine: matrix rate, memory rate, transfers by tier and size, host link, AdamW.

All ranks run these together, in the same order, because that is how a training step loads the machine. Times
are medians over repeats.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from operators.pinned_slab import PinnedSlab
from operators.ranks import Ranks
from tuner.machine.fingerprint import local_hardware
from tuner.measuring.environment import Watch
from tuner.probing.links import Clock, Curves, Pair, card_pairs, curves, node_pairs, tiers, transfer_sizes
from tuner.probing.wiring import Wiring, read_wiring


@dataclass(frozen=True, slots=True)
class RankFigures:
    """Everything one rank measured, JSON but for the names. Rates are per rank while all ranks are busy.

    Attributes:
        curves: by tier (``node``, ``cluster``) and collective, (bytes, seconds).
        host_link: bytes/s each way by number of ranks of the node that copied, where this one was among them.
        card_pairs, node_pairs: swaps with peers on the same node, and on others.
        spread: of the repeats of ``gemm_flops``, ``memory_bytes_per_s``, ``host_link``, ``adam_params_per_s``.
        hardware: of this rank's node (``tuner.machine.fingerprint.local_hardware``).
        wiring: what the first rank of a node read of its links; None on the others.
        watch: what surrounded it (:meth:`tuner.measuring.environment.Watch.answer`).
        device_used_bytes: of the card, by whomever, at the end; None on the CPU.
        complete: False when the time ran out before everything was measured.
    """

    host: str
    hardware: dict[str, Any]
    gemm_flops: float
    memory_bytes_per_s: float
    curves: dict[str, Curves]
    host_link: dict[int, float]
    adam_params_per_s: float
    card_pairs: list[Pair]
    node_pairs: list[Pair]
    watch: dict[str, Any]
    spread: dict[str, float] = field(default_factory=dict)
    wiring: Wiring | None = None
    device_used_bytes: int | None = None
    complete: bool = True


def measure_rank(
    ranks: Ranks,
    device_name: str,
    *,
    nodes: int = 1,
    sizes: Sequence[int] | None = None,
    limit_s: float = 300.0,
    on_part: Callable[[str], None] | None = None,
) -> RankFigures:
    """Measure this rank. A collective: every rank of the gang calls it with the same arguments.

    Args:
        ranks: the whole gang, contiguous ranks on each of ``nodes`` nodes.
        sizes: bytes of the transfers.
        limit_s: after so long only what a cluster file cannot do without is measured.
        on_part: hears of each part before it is measured.
    """
    say = on_part or (lambda _part: None)
    cuda = device_name == "cuda"
    watch = Watch(device_name)
    per_node = ranks.size // nodes
    place = ranks.rank % per_node
    # the card that its process was given, not the rank's number: ranks of another node begin at card 0 again
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    clock = Clock(ranks, device, limit_s)
    spread: dict[str, float] = {}
    say("matrix rate")
    gemm_flops, spread["gemm_flops"] = _gemm_flops(clock, device)
    say("memory rate")
    memory_rate, spread["memory_bytes_per_s"] = _memory_rate(clock, device)
    say("AdamW on the host")
    adam_rate, spread["adam_params_per_s"] = _adam_rate(clock)
    host_link = {}
    with _HostLink(device) as link:
        for active in active_counts(per_node):
            say(f"host link, {active} of {per_node} ranks of a node")
            rate, spread["host_link"] = link.rate(clock, busy=place < active)
            if place < active:
                host_link[active] = rate
    wanted = tuple(sizes) if sizes is not None else transfer_sizes(device)
    with tiers(ranks, nodes) as found:
        by_tier = {tier.name: curves(tier, clock, device, wanted, say) for tier in found}
    inside = card_pairs(ranks, nodes, clock, device, say)
    between = node_pairs(ranks, nodes, clock, device, say) if nodes > 1 else []
    wiring = read_wiring(device_name, per_node) if place == 0 else None
    used = None
    if cuda:
        free, total = torch.cuda.mem_get_info()
        used = total - free
    return RankFigures(
        host=socket.gethostname(),
        hardware=local_hardware(device_name),
        gemm_flops=gemm_flops,
        memory_bytes_per_s=memory_rate,
        curves=by_tier,
        host_link=host_link,
        adam_params_per_s=adam_rate,
        card_pairs=inside,
        node_pairs=between,
        watch=watch.answer(),
        spread=spread,
        wiring=wiring,
        device_used_bytes=used,
        complete=clock.has_time(),
    )


def active_counts(per_node: int) -> list[int]:
    """1, 2, 4, … and all ranks of a node."""
    return sorted({per_node, *(2**power for power in range(per_node.bit_length()) if 2**power < per_node)})


def _gemm_flops(clock: Clock, device: torch.device) -> tuple[float, float]:
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (768, torch.float32)
    left = torch.randn(n, n, device=device, dtype=dtype)
    right = torch.randn(n, n, device=device, dtype=dtype)
    out = torch.empty_like(left)

    def multiply() -> None:
        torch.mm(left, right, out=out)

    timing = clock.time(multiply)
    return 2.0 * n**3 / timing.seconds, timing.spread


def _memory_rate(clock: Clock, device: torch.device) -> tuple[float, float]:
    nbytes = 2**31 if device.type == "cuda" else 2**26
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    out = torch.empty_like(source)

    def copy() -> None:
        out.copy_(source)

    timing = clock.time(copy)
    return 2.0 * nbytes / timing.seconds, timing.spread


class _HostLink:
    """Copies both ways at once between host memory and the device (on CPU a plain copy stands for the link).

    Copies walk through more memory than caches hold: the same buffer again and again looks a third faster.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._bytes, self._pieces = (2**28, 8) if self._cuda else (2**25, 2)
        self._slab = PinnedSlab(self._bytes * self._pieces, pin=self._cuda)
        self._host = self._slab.buffer.view(self._pieces, self._bytes)
        self._down, self._up = (torch.ones(self._bytes, dtype=torch.uint8, device=device) for _ in range(2))
        self._lanes = [torch.cuda.Stream(device) for _ in range(2)] if self._cuda else []
        self._turn = 0

    def __enter__(self) -> _HostLink:
        return self

    def __exit__(self, *_: object) -> None:
        del self._host
        self._slab.close()

    def rate(self, clock: Clock, *, busy: bool) -> tuple[float, float]:
        """Bytes/s each way while the ``busy`` ranks copy, and the spread of the repeats."""
        timing = clock.time(self._both_ways if busy else lambda: None)
        return self._bytes / timing.seconds, timing.spread if busy else 0.0

    def _both_ways(self) -> None:
        source = self._host[self._turn % self._pieces]
        target = self._host[(self._turn + self._pieces // 2) % self._pieces]
        self._turn += 1
        if not self._cuda:
            _both(source, self._down, self._up, target)
            return
        with torch.cuda.stream(self._lanes[0]):
            self._down.copy_(source, non_blocking=True)
        with torch.cuda.stream(self._lanes[1]):
            target.copy_(self._up, non_blocking=True)


def _both(host_in: Tensor, down: Tensor, up: Tensor, host_out: Tensor) -> None:
    down.copy_(host_in)
    host_out.copy_(up)


def _adam_rate(clock: Clock) -> tuple[float, float]:
    """Parameters per second of torch's fused AdamW on this rank's share of the host."""
    n = 2**23  # well past the caches
    weight = torch.nn.Parameter(torch.ones(n))
    weight.grad = torch.ones(n)
    optimizer = torch.optim.AdamW([weight], fused=True)

    def update() -> None:
        optimizer.step()

    timing = clock.time(update)
    return n / timing.seconds, timing.spread
