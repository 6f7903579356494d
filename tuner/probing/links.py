"""Transfers between ranks: all-to-all, ring hop and all-gather by size inside a node and across nodes, and pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic, perf_counter

import torch
import torch.distributed as dist

from operators.ranks import ProcessRanks, Ranks

REPEATS = 5
COLLECTIVES = ("all_to_all", "ring", "all_gather")
_PART_S = 2.0  # most that the repeats of one measurement take
_LEAST_POINTS = 3  # a line through latency and bandwidth needs that many
_SMALL_BYTES = 2**12
_MOST_CARDS_PAIRED = 16

Curve = list[tuple[int, float]]
Curves = dict[str, Curve]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Timing:
    """Median seconds of a repeated piece of work, and the width of the middle half of the repeats, relative to it."""

    seconds: float
    spread: float


@dataclass(frozen=True, slots=True)
class Pair:
    """What one rank saw of a swap with a peer: seconds of a small message, bytes/s each way of a large one."""

    peer: int
    latency_s: float
    bytes_per_s: float
    spread: float


class Clock:
    """Times work that all ranks do together, within a budget that all of them see alike."""

    def __init__(self, ranks: Ranks, device: torch.device, limit_s: float) -> None:
        self._ranks, self._device = ranks, device
        self._ends = monotonic() + limit_s

    def agree(self, value: float) -> float:
        """The largest value of any rank."""
        largest = torch.tensor([value], dtype=torch.float64, device=self._device)
        self._ranks.all_reduce(largest, "max")
        return float(largest)

    def has_time(self) -> bool:
        """Whether the budget is not used up on any rank."""
        return self.agree(monotonic() - self._ends) < 0

    def time(self, work: Callable[[], object], repeats: int = REPEATS) -> Timing:
        """Time ``work`` on this rank, begun by all ranks at once: fewer repeats of what takes long."""
        self._once(work)  # what the first time sets up
        first = self.agree(self._once(work))
        seconds = sorted(
            self._once(work) for _ in range(max(1, min(repeats, int(_PART_S / max(first, 1e-9)))))
        )
        middle = seconds[len(seconds) // 2]
        quarter = len(seconds) // 4
        return Timing(middle, (seconds[-1 - quarter] - seconds[quarter]) / middle)

    def _once(self, work: Callable[[], object]) -> float:
        self._sync()
        self._ranks.barrier()
        self._sync()
        start = perf_counter()
        work()
        self._sync()
        return perf_counter() - start

    def _sync(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@dataclass(frozen=True, slots=True)
class Tier:
    """The ranks that this rank meets in one tier."""

    name: str
    ranks: ProcessRanks
    group: dist.ProcessGroup | None


@contextmanager
def tiers(ranks: Ranks, nodes: int) -> Iterator[list[Tier]]:
    """Tier ``node``: this node's ranks. With several nodes tier ``cluster``: the ranks of the same place on each."""
    size, per_node = ranks.size, ranks.size // nodes
    made: list[dist.ProcessGroup] = []

    def join(name: str, members: Sequence[range]) -> Tier:
        mine: dist.ProcessGroup | None = None
        for some in members:  # every rank makes every group, in the same order
            group = dist.new_group(list(some))
            if ranks.rank in some:
                mine = group
                made.append(group)
        return Tier(name, ProcessRanks(mine), mine)

    try:
        if nodes == 1:
            yield [Tier("node", ProcessRanks(), None)]
            return
        found = [join("node", [range(n * per_node, (n + 1) * per_node) for n in range(nodes)])]
        if nodes > 1:
            found.append(join("cluster", [range(place, size, per_node) for place in range(per_node)]))
        yield found
    finally:
        for group in made:
            dist.destroy_process_group(group)


def transfer_sizes(device: torch.device) -> tuple[int, ...]:
    """Sizes worth measuring: from where latency rules to where bandwidth does."""
    top = 2**30 if device.type == "cuda" else 2**23
    return tuple(size for size in (2**12, 2**16, 2**18, 2**20, 2**23, 2**26, 2**28, 2**30) if size <= top)


def curves(tier: Tier, clock: Clock, device: torch.device, sizes: Sequence[int], say: Say) -> Curves:
    """Seconds of every collective by bytes: what a rank sends (all-to-all, ring) or ends up with (all-gather).

    A curve ends early where the next size would take too long, or when the budget is used up.
    """
    found: Curves = {name: [] for name in COLLECTIVES}
    going = list(COLLECTIVES)
    for index, nbytes in enumerate(sizes):
        if not going or (index >= _LEAST_POINTS and not clock.has_time()):
            break
        say(f"{tier.name}: {', '.join(going).replace('_', '-')} of {nbytes:,} bytes")
        for name in list(going):
            seconds = clock.time(_collective(name, tier, device, nbytes)).seconds
            found[name].append((nbytes, seconds))
            following = sizes[index + 1] if index + 1 < len(sizes) else nbytes
            too_long = clock.agree(seconds) * following / nbytes > _PART_S
            if too_long and index + 1 >= _LEAST_POINTS:
                going.remove(name)
    return found


def _collective(name: str, tier: Tier, device: torch.device, nbytes: int) -> Callable[[], object]:
    ranks, group = tier.ranks, tier.group
    if name == "ring":
        source = torch.ones(nbytes, dtype=torch.uint8, device=device)
        out = torch.empty_like(source)
        return lambda: ranks.shift(source, out).wait()
    rows = max(1, nbytes // ranks.size)
    whole = torch.ones(rows * ranks.size, 1, dtype=torch.uint8, device=device)
    if name == "all_gather":
        part = torch.ones(rows, 1, dtype=torch.uint8, device=device)
        if device.type != "cuda":  # gloo's own holds one direction of the link up for the other
            return lambda: ranks.all_gather(part)
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    out, splits = torch.empty_like(whole), [rows] * ranks.size
    return lambda: ranks.all_to_all(out, whole, splits, splits).wait()


def card_pairs(ranks: Ranks, nodes: int, clock: Clock, device: torch.device, say: Say) -> list[Pair]:
    """Every pair of ranks of a node, one pair a rank at a time, all nodes at once. Peers are ranks of the gang."""
    per_node = ranks.size // nodes
    if not 1 < per_node <= _MOST_CARDS_PAIRED:
        return []
    node, place = divmod(ranks.rank, per_node)
    schedule = rounds(per_node)
    return _swaps(
        [node * per_node + p if p is not None else None for p in (r[place] for r in schedule)],
        "pairs of a node",
        clock,
        device,
        say,
    )


def node_pairs(ranks: Ranks, nodes: int, clock: Clock, device: torch.device, say: Say) -> list[Pair]:
    """Every pair of nodes, one pair a node at a time, all of their ranks at once. Peers are ranks of the gang."""
    per_node = ranks.size // nodes
    node, place = divmod(ranks.rank, per_node)
    return _swaps(
        [p * per_node + place if p is not None else None for p in (r[node] for r in rounds(nodes))],
        "pairs of nodes",
        clock,
        device,
        say,
    )


def rounds(count: int) -> list[list[int | None]]:
    """A tournament: for each round who meets whom; None sits out. Everybody meets everybody once."""
    seats: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    found = []
    for _ in range(len(seats) - 1):
        meets: list[int | None] = [None] * count
        for one, other in zip(seats[: len(seats) // 2], reversed(seats), strict=False):
            if one is not None and other is not None:
                meets[one], meets[other] = other, one
        found.append(meets)
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def _swaps(peers: list[int | None], what: str, clock: Clock, device: torch.device, say: Say) -> list[Pair]:
    large = 2**28 if device.type == "cuda" else 2**22
    found: list[Pair] = []
    for index, peer in enumerate(peers):
        if not clock.has_time():
            break
        say(f"{what}, round {index + 1} of {len(peers)}")
        small = clock.time(_swap(peer, device, _SMALL_BYTES))
        # a slow link shows on a smaller message as well
        nbytes = large if clock.agree(small.seconds) < 0.01 else large // 16
        big = clock.time(_swap(peer, device, nbytes))
        if peer is not None:
            found.append(Pair(peer, small.seconds, nbytes / big.seconds, big.spread))
    return found


def _swap(peer: int | None, device: torch.device, nbytes: int) -> Callable[[], None]:
    if peer is None:
        return lambda: None
    send = torch.ones(nbytes, dtype=torch.uint8, device=device)
    receive = torch.empty_like(send)

    def swap() -> None:
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, receive, peer), dist.P2POp(dist.isend, send, peer)]
        )
        for work in works:
            work.wait()

    return swap
