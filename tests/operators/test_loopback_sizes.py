"""A loopback rank moves exactly the bytes that rank of a real group moves, exchange by exchange."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from operators.dispatch_launch import DispatchLaunch, DispatchSchedule
from operators.dispatch_plan import gathered_counts
from operators.pipelined_llep import pipelined_llep
from operators.ranks import LoopbackRanks, Pending, ProcessRanks, ReduceOp
from operators.ring_dtp import RingMode, ring_dtp
from operators.routing import profile
from tests.gang import gang
from tests.operators.dense_moe import draw

_RANKS, _TOKENS, _EXPERTS, _TOP_K = 4, (20, 7, 0, 12), 8, 2
_SCHEDULES: tuple[DispatchSchedule, ...] = ("serial", "prefetch", "overlap")
_MODES: tuple[RingMode, ...] = ("activations", "weights", "gather")
Log = list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]]


class Recorded:
    """A group that notes what is exchanged."""

    def __init__(self, ranks: ProcessRanks | LoopbackRanks) -> None:
        self._ranks = ranks
        self.log: Log = []

    @property
    def size(self) -> int:
        return self._ranks.size

    @property
    def rank(self) -> int:
        return self._ranks.rank

    def _note(self, kind: str, a: Tensor, b: Tensor, x: Sequence[int] = (), y: Sequence[int] = ()) -> None:
        self.log.append((f"{kind} {a.dtype}", tuple(a.shape), tuple(b.shape), tuple(x), tuple(y)))

    def all_gather(self, x: Tensor) -> Tensor:
        self._note("gather", x, x)
        return self._ranks.all_gather(x)

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> None:
        self._note(op, x, x)
        self._ranks.all_reduce(x, op)

    def all_to_all(
        self, output: Tensor, source: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Pending:
        self._note("rows", output, source, output_splits, input_splits)
        return self._ranks.all_to_all(output, source, output_splits, input_splits)

    def shift(self, send: Tensor, receive: Tensor, by: int = 1) -> Pending:
        self._note("hop", receive, send, (by,))
        return self._ranks.shift(send, receive, by)

    def barrier(self) -> None:
        self._ranks.barrier()


def _dispatched(ranks: ProcessRanks | LoopbackRanks, schedule: DispatchSchedule) -> Log:
    routings = [
        profile("rank_dependent", n, _EXPERTS, _TOP_K, r, ranks=_RANKS) for r, n in enumerate(_TOKENS)
    ]
    launch = DispatchLaunch(
        chunk_tokens=6, max_chunks=5, min_rows=2, lambda_=1.05, dispatch_schedule=schedule
    )
    if isinstance(ranks, LoopbackRanks):
        counts = gathered_counts(routings, launch)
        ranks = LoopbackRanks(_RANKS, ranks.rank, gathered=[counts], largest=max(_TOKENS))
    group, me = Recorded(ranks), ranks.rank
    layer = draw(routings, 6, 5, bias=True, dtype=torch.float32)
    x = layer.hidden[me].requires_grad_()
    own = layer.local(me, _RANKS)
    pipelined_llep(x, layer.scores[me], routings[me], own, ranks=group, launch=launch).sum().backward()
    return group.log


def _headed(ranks: ProcessRanks | LoopbackRanks, mode: RingMode) -> Log:
    group = Recorded(ranks)
    hidden, weight = torch.randn(7, 6, requires_grad=True), torch.randn(5, 6, requires_grad=True)
    bias = torch.zeros(5, requires_grad=True)
    ring_dtp(hidden, weight, torch.arange(7), ranks=group, mode=mode, bias=bias).backward()
    return group.log


def _real(ranks: ProcessRanks) -> list[Log]:
    return [_dispatched(ranks, s) for s in _SCHEDULES] + [_headed(ranks, m) for m in _MODES]


def test_every_exchange_has_the_sizes_of_the_real_one() -> None:
    for rank, logs in enumerate(gang(_RANKS).run(_real)):
        alone = LoopbackRanks(_RANKS, rank)
        mine = [_dispatched(alone, s) for s in _SCHEDULES] + [_headed(alone, m) for m in _MODES]
        assert mine == logs
        assert (
            sum(kind.startswith("rows torch.float32") for kind, *_ in logs[0]) > 20
        )  # guests and chunks took part
