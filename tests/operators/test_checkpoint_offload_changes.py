"""SCO where a step is not like the one before: other lengths, sessions in each other, random numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from operators.checkpoint_offload import OffloadSession
from operators.pinned_slab import page_rounded

_H = 32
_PLANNED = 40


def _stack() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Sequential(nn.Linear(_H, _H), nn.Dropout(0.3), nn.Tanh()) for _ in range(6)])


def _run(stack: nn.ModuleList, tokens: int, *, reentrant: bool = False) -> Tensor:
    torch.manual_seed(tokens)
    x: Tensor = stack[0](torch.randn(tokens, _H))
    for block in list(stack)[1:]:
        x = checkpoint(block, x, use_reentrant=reentrant)
    return x.square().mean()


def _grads(stack: nn.ModuleList, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(stack.parameters())))


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_lengths_may_change_between_steps() -> None:
    """Shorter boundaries leave more room, longer ones stay on the device as far as they do not fit."""
    stack = _stack()
    room = page_rounded(_PLANNED * _H * 4)
    session = OffloadSession(3 * room, boundary_bytes=_PLANNED * _H * 4, boundaries=5, device="cpu")
    went = {}
    for tokens in (_PLANNED, 30, 100, 1000, _PLANNED):
        want = _grads(stack, _run(stack, tokens))
        with session:
            loss = _run(stack, tokens)
        assert session.report().used_bytes <= session.report().locked_bytes == 3 * room
        assert _same(want, _grads(stack, loss)), tokens
        went[tokens] = session.report().offloaded
        del loss
        assert session.report().used_bytes == 0
    assert went == {_PLANNED: 3, 30: 4, 100: 1, 1000: 0} or went == {_PLANNED: 3, 30: 3, 100: 1, 1000: 0}


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_is_recomputed_with_its_own_random_numbers(reentrant: bool) -> None:
    stack = _stack()

    def grads(session: OffloadSession | None) -> list[Tensor]:
        stack.zero_grad()
        if session is None:
            loss = _run(stack, _PLANNED, reentrant=reentrant)
        else:
            with session:
                loss = _run(stack, _PLANNED, reentrant=reentrant)
        torch.manual_seed(99)  # as a later layer would leave it
        loss.backward()
        assert torch.equal(torch.random.get_rng_state(), torch.Generator().manual_seed(99).get_state())
        return [p.grad.clone() for p in stack.parameters() if p.grad is not None]

    want = grads(None)
    session = OffloadSession(1 << 20, min_bytes=1, device="cpu")
    assert _same(want, grads(session))
    assert session.report().offloaded == 4


def test_sessions_in_each_other() -> None:
    """The inner one takes the boundaries of its time, the outer one goes on behind it."""
    stack = _stack()
    want = _grads(stack, _run(stack, _PLANNED))
    outer, inner = (OffloadSession(1 << 20, min_bytes=1, device="cpu") for _ in range(2))
    with outer:
        with inner:
            first = _run(stack, _PLANNED)
        second = _run(stack, _PLANNED)
        assert _same(want, _grads(stack, first))
        with outer:
            third = _run(stack, _PLANNED)
    assert _same(want, _grads(stack, third))
    assert _same(want, _grads(stack, second))
    del first, second, third
    assert (outer.report().offloaded, inner.report().offloaded) == (4, 4)
    assert (outer.report().used_bytes, inner.report().used_bytes) == (0, 0)
