"""SCO on a GPU: late copies, reused memory, exact locked bytes, no waiting and no host allocation in a step."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from operators.checkpoint_offload import OffloadSession
from operators.checkpoint_offload_slots import BoundarySlab
from operators.pinned_slab import PinnedSlab, page_rounded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="copies beside the compute stream need CUDA"),
]

_WIDTH = 1024
_ROWS = (64 << 20) // (2 * _WIDTH)
_SIZE = _ROWS * _WIDTH * 2


def _block(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x @ weight)


def _sleep(session: OffloadSession | None) -> None:
    if session is not None and session.slab.lane.stream is not None:
        with torch.cuda.stream(session.slab.lane.stream):
            torch.cuda._sleep(200_000_000)


def _run(
    weights: list[Tensor], session: OffloadSession | None, *, reentrant: bool, sleep: bool = False
) -> list[Tensor]:
    for weight in weights:
        weight.grad = None

    def forward() -> Tensor:
        x = torch.ones(_ROWS, _WIDTH, device="cuda", dtype=torch.bfloat16) * weights[0][0]
        for weight in weights:
            if sleep:
                _sleep(session)
            base = torch.cat([x.new_full((3, _WIDTH), torch.nan), x])
            x = checkpoint(_block, base[3:], weight, use_reentrant=reentrant)
            del base
            torch.full((_ROWS + 3, _WIDTH), torch.nan, device="cuda", dtype=torch.bfloat16)
        return x.float().square().mean()

    if session is None:
        loss = forward()
    else:
        with session:
            loss = forward()
    if sleep:
        _sleep(session)
    loss.backward()
    return [weight.grad.clone() for weight in weights if weight.grad is not None]


def _weights(count: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [
        (torch.randn(_WIDTH, _WIDTH, device="cuda", dtype=torch.bfloat16) / 32).requires_grad_()
        for _ in range(count)
    ]


@pytest.mark.parametrize("reentrant", [False, True])
def test_late_copies_and_reused_memory_change_no_bit(reentrant: bool) -> None:
    weights = _weights(4)
    want = _run(weights, None, reentrant=reentrant)
    session = OffloadSession(3 * _SIZE, boundary_bytes=_SIZE, boundaries=4)
    for _ in range(2):
        got = _run(weights, session, reentrant=reentrant, sleep=True)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert session.report().offloaded == 3
    assert session.report().most_restored == 2
    session.close()


def test_locked_bytes_are_exact_and_pinned() -> None:
    size = (1 << 20) + 1
    with BoundarySlab(3 * page_rounded(size)) as slab:
        assert slab.locked_bytes == 3 * page_rounded(size)
        assert slab.view(0, size).is_pinned()
    with PinnedSlab(size) as pinned:
        assert pinned.is_pinned
        assert pinned.locked_bytes == page_rounded(size)


def test_the_peak_falls_by_what_left_and_no_step_allocates_on_the_host_or_waits() -> None:
    weights = _weights(8)

    def peak(session: OffloadSession | None) -> int:
        _run(weights, session, reentrant=False)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        _run(weights, session, reentrant=False)
        return torch.cuda.max_memory_allocated()

    kept = peak(None)
    session = OffloadSession(100 * _SIZE, boundary_bytes=_SIZE, boundaries=8)
    assert peak(session) <= kept - 5 * _SIZE  # of 7 away, two may be back
    before = torch.cuda.host_memory_stats().get("num_host_alloc", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            _run(weights, session, reentrant=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.host_memory_stats().get("num_host_alloc", 0) == before
    session.close()
