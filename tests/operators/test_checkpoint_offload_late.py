"""The order of copies, with a lane on which every copy runs as late as it is allowed to.

Copies wait in a queue until somebody waits for them, as on a side stream that a long kernel holds up. A tensor that
died before its copy ran is read as NaN; a copy into a tensor that died is a write to somebody else's memory.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from operators.checkpoint_offload import OffloadSession
from operators.checkpoint_offload_lane import CopyLane, Layout, Mark
from operators.checkpoint_offload_slots import BoundarySlab
from operators.pinned_slab import page_rounded

_N, _H = 16, 24
_ONE = page_rounded(_N * _H * 4)


class LateMark(Mark):
    """Runs the queue up to its copy when waited for."""

    def __init__(self, lane: LateLane, place: int) -> None:
        super().__init__(None)
        self._lane, self._place = lane, place

    def wait(self, stream: torch.cuda.Stream | None) -> None:
        self._lane.run_to(self._place)


class LateLane(CopyLane):
    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._queue: list[Callable[[], None]] = []
        self._done = 0
        self.wild_writes = 0

    def run_to(self, place: int) -> None:
        while self._done <= place:
            self._queue[self._done]()
            self._done += 1

    def run_all(self) -> None:
        self.run_to(len(self._queue) - 1)

    def to_host(self, x: Tensor, piece: Tensor) -> Mark:
        alive, write = weakref.ref(x), super().to_host

        def copy() -> None:
            source = alive()
            if source is None:
                piece.view(torch.float32).fill_(torch.nan)
            else:
                write(source, piece)

        return self._later(copy)

    def to_device(
        self, piece: Tensor | None, layout: Layout, fake: FakeTensorMode | None
    ) -> tuple[Tensor, Mark]:
        assert piece is not None
        x = torch.full(layout.size, torch.nan)
        alive = weakref.ref(x)

        def copy() -> None:
            target = alive()
            if target is None:
                self.wild_writes += 1
            else:
                with torch.no_grad():
                    target.view(-1).copy_(piece.view(torch.float32))

        return x, self._later(copy)

    def _later(self, copy: Callable[[], None]) -> Mark:
        self._queue.append(copy)
        return LateMark(self, len(self._queue) - 1)


class _Ill(Exception):
    pass


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_H, _H)
        self.ill = False

    def forward(self, x_NH: Tensor) -> Tensor:
        if self.ill and torch._C._current_graph_task_id() != -1:
            raise _Ill
        y_NH: Tensor = torch.tanh(self.linear(x_NH))
        return y_NH


def _loss(blocks: list[_Block], reentrant: bool) -> Tensor:
    x_NH = blocks[0].linear(torch.ones(_N, _H))
    for block in blocks:
        x_NH = checkpoint(block, x_NH, use_reentrant=reentrant)
    loss: Tensor = x_NH.square().sum()
    return loss


def _grads(blocks: list[_Block], loss: Tensor, times: int = 1) -> list[Tensor]:
    for block in blocks:
        block.zero_grad()
    for i in range(times):
        loss.backward(retain_graph=i + 1 < times)
    return [p.grad.clone() for block in blocks for p in block.parameters() if p.grad is not None]


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(2, 7),
    room=st.integers(1, 7),
    reentrant=st.booleans(),
    backwards=st.integers(1, 2),
    ill=st.none() | st.integers(0, 6),
    told=st.booleans(),
    forwards=st.integers(1, 3),
)
def test_late_copies_change_no_bit_and_write_nowhere_else(
    count: int, room: int, reentrant: bool, backwards: int, ill: int | None, told: bool, forwards: int
) -> None:
    torch.manual_seed(0)
    blocks = [_Block() for _ in range(count)]
    want = _grads(blocks, _loss(blocks, reentrant), backwards)
    with BoundarySlab(room * _ONE) as slab:
        lane = slab.lane = LateLane()
        session = OffloadSession(room * _ONE, slab=slab, min_bytes=1, boundaries=count if told else None)
        for step in range(3):
            losses = []
            for _ in range(forwards):
                with session:
                    losses.append(_loss(blocks, reentrant))
            if step == 1 and ill is not None:
                blocks[ill % count].ill = True
                with contextlib.suppress(_Ill):
                    losses[0].backward()
                blocks[ill % count].ill = False
                losses.clear()
                continue
            while losses:
                got = _grads(blocks, losses.pop(0), backwards)
                assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
        session.report()
        lane.run_all()
        assert lane.wild_writes == 0


def test_the_lane_would_show_a_missing_wait() -> None:
    lane, piece = LateLane(), torch.zeros(_N * _H * 4, dtype=torch.uint8)
    x = torch.ones(_N, _H)
    mark = lane.to_host(x, piece)
    layout = Layout.of(x)
    del x
    mark.wait(None)
    y, mark = lane.to_device(piece, layout, None)
    assert bool(y.isnan().all())
    del y
    mark.wait(None)
    assert lane.wild_writes == 1
