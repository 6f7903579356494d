"""The group an operator talks through: a process group, or a loopback stand-in.

An operator is written once against :class:`Ranks`. :class:`ProcessRanks` carries it over gloo or NCCL.
:class:`LoopbackRanks` lets one process run the exact schedule of one rank of a larger group: what would come
from a peer is a local copy of the right size, so memory and compute are true, values from peers are not, and
link time is absent.

Every method is a collective: all ranks of the group call it in the same order, with or without data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from operators.errors import RuleError

ReduceOp = Literal["sum", "max", "min"]
_KINDS = ("all_gather", "all_to_all", "shift")
_NUMBERS, _FIRST_TAG = 2**28, 2**30
"""Tags are far from those that callers give their own sends on the same group."""
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Pending(Protocol):
    """A transfer under way. ``wait`` orders the current stream (or thread) behind it."""

    def wait(self) -> None: ...


class Ranks(Protocol):
    """What an operator may ask of its group."""

    @property
    def size(self) -> int: ...
    @property
    def rank(self) -> int: ...

    def all_gather(self, x: Tensor) -> Tensor:
        """``[*s]`` on every rank, equal shapes -> ``[size, *s]``."""

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce ``x`` over the group, in place."""

    def all_to_all(
        self, output: Tensor, source: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Pending:
        """Send ``input_splits[r]`` leading rows of ``source`` to rank r, receive ``output_splits[r]`` from it."""

    def shift(self, send: Tensor, receive: Tensor, by: int = 1) -> Pending:
        """Ring hop: ``send`` to rank + by, ``receive`` from rank - by. Sizes may differ between ranks."""

    def barrier(self) -> None: ...


class _Done:
    def wait(self) -> None:
        return


class _Works:
    """Works of one exchange, with the tensors they read and write kept alive until the wait."""

    def __init__(self, works: Sequence[dist.Work], *keep: Tensor) -> None:
        self._works = works
        self._keep = keep

    def wait(self) -> None:
        works, self._works = self._works, ()
        for work in works:
            work.wait()
        self._keep = ()


class _Posted(_Works):
    """Sends and receives over gloo: they end with their Python objects, so who drops one unwaited does not end it.

    A caller that raised between an exchange and its wait would leave messages that nobody takes, and with them a
    group on which nothing arrives any more. They stay in ``held`` until the wait, or until a later gather has
    brought something from and to every rank: whatever was posted before has arrived by then.
    """

    def __init__(
        self, held: dict[int, _Posted], number: int, works: Sequence[dist.Work], *keep: Tensor
    ) -> None:
        super().__init__(works, *keep)
        self._held, self._number = held, number
        if works:
            held[number] = self

    def wait(self) -> None:
        try:
            super().wait()
        finally:
            self._held.pop(self._number, None)

    def let_go(self) -> None:
        """After the wait for an exchange with every rank: what was posted before it is not held any longer."""
        for number in [n for n in self._held if n < self._number]:
            del self._held[number]


@dataclass
class _Exchanges:
    """Exchanges of a group so far: how many, and those that nobody has waited for yet."""

    count: int = 0
    held: dict[int, _Posted] = field(default_factory=dict)


_EXCHANGES: WeakKeyDictionary[dist.ProcessGroup, _Exchanges] = WeakKeyDictionary()


def _as_bytes(x: Tensor) -> Tensor:
    """Rows as raw bytes: a transfer does not care for the dtype, and gloo does not know all of them."""
    if x.numel() == 0:
        return x.new_empty((x.shape[0], 0), dtype=torch.uint8)
    return x.reshape(x.shape[0], -1).view(torch.uint8)


class ProcessRanks:
    """A ``torch.distributed`` process group (gloo or NCCL).

    Raises:
        RuleError: torch.distributed is not initialised, or this process is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise RuleError(
                rule="ProcessRanks needs an initialised process group",
                value=None,
                remedy="Call torch.distributed.init_process_group first, or use LoopbackRanks.",
            )
        world = dist.group.WORLD
        assert world is not None
        self._group: dist.ProcessGroup = group if group is not None else world
        if dist.get_rank(self._group) < 0:
            raise RuleError(
                rule="a rank may only use groups it belongs to",
                value=dist.get_rank(),
                remedy="Build ProcessRanks from the subgroup that holds this rank.",
            )
        self._gloo = dist.get_backend(self._group) == "gloo"

    @property
    def size(self) -> int:
        return dist.get_world_size(self._group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group)

    def all_gather(self, x: Tensor) -> Tensor:
        if not self._posts(x):
            parts = [x.new_empty(x.shape) for _ in range(self.size)]
            dist.all_gather(parts, x.contiguous(), group=self._group)
            return torch.stack(parts)
        gathered = x.new_empty((self.size, *x.shape))
        gathered[self.rank] = x.detach()
        mine = x.detach().contiguous()
        posted = self._post("all_gather", [mine] * self.size, list(gathered.unbind()))
        posted.wait()
        if isinstance(posted, _Posted) and x.numel():
            posted.let_go()
        return gathered

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> None:
        dist.all_reduce(x, op=_OPS[op], group=self._group)

    def all_to_all(
        self, output: Tensor, source: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Pending:
        source = source.contiguous()
        row_bytes = source[0].numel() * source.element_size() if source.shape[0] else 0
        out_row_bytes = output[0].numel() * output.element_size() if output.shape[0] else 0
        flat_out, flat_in = _as_bytes(output).flatten(), _as_bytes(source).flatten()
        if self._posts(flat_in):
            received = flat_out.split([n * out_row_bytes for n in output_splits])
            sent = flat_in.split([n * row_bytes for n in input_splits])
            if received[self.rank].numel() != sent[self.rank].numel():
                raise RuleError(
                    rule="a rank receives from itself what it sends to itself",
                    value=(output_splits[self.rank], input_splits[self.rank]),
                    remedy="Give the same own split for output and source.",
                )
            received[self.rank].copy_(sent[self.rank])
            return self._post("all_to_all", sent, received)
        work = dist.all_to_all_single(
            flat_out,
            flat_in,
            [n * out_row_bytes for n in output_splits],
            [n * row_bytes for n in input_splits],
            group=self._group,
            async_op=True,
        )
        return _Works([work] if work is not None else [], flat_out, flat_in)

    def shift(self, send: Tensor, receive: Tensor, by: int = 1) -> Pending:
        if self.size == 1 or by % self.size == 0:
            receive.copy_(send)
            return _Done()
        to, source = (self.rank + by) % self.size, (self.rank - by) % self.size
        send = send.contiguous()
        if self._gloo and send.is_cuda:  # gloo moves CUDA tensors by all-to-all, not by send and receive
            out_splits = [receive.numel() if r == source else 0 for r in range(self.size)]
            in_splits = [send.numel() if r == to else 0 for r in range(self.size)]
            return self.all_to_all(receive.view(-1), send.view(-1), out_splits, in_splits)
        nothing = send.new_empty(0)
        return self._post(
            "shift",
            [send if r == to else nothing for r in range(self.size)],
            [receive if r == source else nothing for r in range(self.size)],
        )

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def _posts(self, x: Tensor) -> bool:
        """Whether a collective of ``x`` is made of sends and receives here.

        gloo's own collectives send before they are ready to receive. A receiver's readiness then waits, on the one
        connection of a pair, behind the data that goes the other way, and the two directions of a full-duplex link
        carry their data one after the other.
        """
        return self._gloo and not x.is_cuda

    def _post(self, kind: str, sent: Sequence[Tensor], received: Sequence[Tensor]) -> _Works:
        """Exchange with every other rank, ``sent[r]`` for ``received[r]``: all receives stand before the first send.

        As gloo's own collectives they are told apart by kind and number: a rank that left one out meets nobody.
        """
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        into = [(received[r], r) for r in reversed(others) if received[r].numel()]
        out = [(sent[r], r) for r in others if sent[r].numel()]
        exchanges = _EXCHANGES.setdefault(self._group, _Exchanges())
        number, exchanges.count = exchanges.count, exchanges.count + 1
        tag = _FIRST_TAG + number % _NUMBERS * len(_KINDS) + _KINDS.index(kind) if self._gloo else 0
        ops = [dist.P2POp(dist.irecv, x, group=self._group, tag=tag, group_peer=r) for x, r in into]
        ops += [dist.P2POp(dist.isend, x, group=self._group, tag=tag, group_peer=r) for x, r in out]
        works = dist.batch_isend_irecv(ops) if ops else []
        if self._gloo:
            return _Posted(exchanges.held, number, works, *sent, *received)
        return _Works(works, *sent, *received)


class _StreamCopy:
    """A local copy on a stream of its own, so that loopback overlaps as a transfer would."""

    def __init__(self, event: torch.cuda.Event, *keep: Tensor) -> None:
        self._event = event
        self._keep = keep

    def wait(self) -> None:
        self._event.wait()
        self._keep = ()


class LoopbackRanks:
    """Rank ``rank`` of a group of ``size`` that is not there.

    Peers are taken to hold what this rank holds: gathers return copies of the own value, reductions of a sum
    multiply by ``size``, and received rows are copied from the rows sent, repeated to the size asked for.

    Args:
        size: Ranks of the group.
        rank: Which of them this process plays.
        gathered: What all ranks would bring to a gather, ``[size, *s]`` each: a gather of ``[*s]`` returns the
            first of that shape with the own value in its row. For routers that differ between ranks: give all
            ranks' counts, and every size follows from them.
        largest: What a max-reduction over the group gives at least in its first element: the token count of the
            longest rank.
    """

    def __init__(
        self, size: int, rank: int = 0, *, gathered: Sequence[Tensor] = (), largest: int | None = None
    ) -> None:
        if size < 1 or not 0 <= rank < size:
            raise RuleError(
                rule="a loopback rank must lie in [0, size)",
                value=(rank, size),
                remedy="Choose size >= 1 and 0 <= rank < size.",
            )
        self._size, self._rank = size, rank
        self._gathered = tuple(gathered)
        self._largest = largest
        self._stream: torch.cuda.Stream | None = None

    @property
    def size(self) -> int:
        return self._size

    @property
    def rank(self) -> int:
        return self._rank

    def all_gather(self, x: Tensor) -> Tensor:
        for known in self._gathered:
            if tuple(known.shape) == (self._size, *x.shape):
                out = known.to(device=x.device, dtype=x.dtype, copy=True)
                out[self._rank] = x
                return out
        return x.unsqueeze(0).expand(self._size, *x.shape).contiguous()

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> None:
        if op == "sum":
            x.mul_(self._size)
        elif op == "max" and self._largest is not None:
            x.view(-1)[:1].clamp_(min=self._largest)

    def all_to_all(
        self, output: Tensor, source: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Pending:
        del output_splits, input_splits
        return self._copy(output, source)

    def shift(self, send: Tensor, receive: Tensor, by: int = 1) -> Pending:
        del by
        return self._copy(receive.view(-1), send.reshape(-1))

    def barrier(self) -> None:
        return

    def _copy(self, output: Tensor, source: Tensor) -> Pending:
        if not output.is_cuda:
            _fill_from(output, source)
            return _Done()
        if self._stream is None:
            self._stream = torch.cuda.Stream(output.device)
        self._stream.wait_stream(torch.cuda.current_stream(output.device))
        with torch.cuda.stream(self._stream):
            _fill_from(output, source)
            event = torch.cuda.Event()
            event.record()
        return _StreamCopy(event, output, source)


def _fill_from(output: Tensor, source: Tensor) -> None:
    """Fill the rows of ``output`` with the rows of ``source``, repeated as often as needed, with no temporary."""
    rows, have = output.shape[0], source.shape[0]
    if rows == 0:
        return
    if have == 0:
        output.zero_()
        return
    for start in range(0, rows, have):
        n = min(have, rows - start)
        output[start : start + n].copy_(source[:n])
