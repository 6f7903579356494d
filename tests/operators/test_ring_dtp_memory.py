"""What Ring-DTP holds: never more than its bound, at toy and at full size, and far less than whole logits."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from operators.bounds.ring_dtp import materialised_head_bytes, ring_dtp_terms
from operators.dry_run import PeakTracker, dry_run
from operators.ranks import LoopbackRanks
from operators.ring_dtp import GradientHop, RingMode, ring_dtp

GIB = 2**30
_MODES: tuple[RingMode, ...] = ("activations", "weights", "gather")
_HOPS: tuple[GradientHop, ...] = ("serial", "overlapped")


def _bound(
    tokens: int,
    hidden: int,
    vocab: int,
    ranks: int,
    *,
    mode: str,
    strip_rows: int,
    dtype: torch.dtype,
    hop: str = "serial",
    passes: tuple[str, ...] = ("forward", "backward"),
) -> int:
    return max(
        sum(
            ring_dtp_terms(
                tokens=tokens,
                hidden=hidden,
                vocab=vocab,
                vocab_ranks=ranks,
                ring_mode=mode,
                strip_rows=strip_rows,
                pass_=one,
                scalar_bytes=dtype.itemsize,
                gradient_hop=hop,
            ).values()
        )
        for one in passes
    )


@pytest.mark.parametrize(
    ("tokens", "mode", "hop", "dtype", "aim"),
    [
        (16_384, "activations", "serial", torch.float32, 3.7),
        (16_384, "activations", "overlapped", torch.float32, 4.2),
        (32_768, "weights", "serial", torch.float32, 5.3),
        (32_768, "weights", "overlapped", torch.float32, 6.0),
        (131_072, "weights", "serial", torch.bfloat16, 8.6),
        (16_384, "activations", "serial", torch.bfloat16, 3.0),
        (16_384, "gather", "serial", torch.bfloat16, 11.2),
    ],
)
def test_full_size_dry_run_stays_within_bound_and_aim(
    tokens: int, mode: RingMode, hop: GradientHop, dtype: torch.dtype, aim: float
) -> None:
    hidden, vocab, ranks, rows = 7168, 200_000, 8, 4096

    def build() -> tuple[Tensor, ...]:
        x = torch.empty(tokens, hidden, dtype=dtype, requires_grad=True)
        w = torch.empty(vocab // ranks, hidden, dtype=dtype, requires_grad=True)
        return x, w, torch.empty(tokens, dtype=torch.int64)

    def step(x: Tensor, w: Tensor, t: Tensor, backward: bool = True) -> Tensor:
        with torch.set_grad_enabled(backward):
            loss = ring_dtp(x, w, t, ranks=LoopbackRanks(ranks), mode=mode, strip_rows=rows, gradient_hop=hop)
        if backward:
            loss.backward()
        return loss

    peak = dry_run(build, step).peak_bytes
    bound = _bound(tokens, hidden, vocab, ranks, mode=mode, strip_rows=rows, dtype=dtype, hop=hop)
    assert peak <= bound <= 1.06 * peak
    if dtype is torch.float32:
        assert bound <= 1.01 * peak
        assert 10 * peak < materialised_head_bytes(tokens=tokens, hidden=hidden, vocab=vocab)
    assert bound / GIB <= aim
    if mode == "gather":  # its forward makes gradients when they are wanted
        return
    forward = dry_run(build, lambda x, w, t: step(x, w, t, backward=False)).peak_bytes
    assert forward <= _bound(
        tokens,
        hidden,
        vocab,
        ranks,
        mode=mode,
        strip_rows=rows,
        dtype=dtype,
        hop=hop,
        passes=("forward",),
    )


def test_tracked_peak_stays_within_the_bound() -> None:
    tokens, hidden, vocab = 96, 32, 200
    schedules: list[tuple[RingMode, GradientHop]] = [
        *product(_MODES, _HOPS[:1]),
        ("activations", _HOPS[1]),
        ("weights", _HOPS[1]),
    ]
    for (mode, hop), dtype, ranks in product(schedules, (torch.float32, torch.bfloat16), (1, 2, 5)):
        rows, bias = 16 * ranks, ranks == 2
        x = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
        w = torch.randn(vocab // ranks, hidden, dtype=dtype, requires_grad=True)
        b = torch.randn(vocab // ranks, dtype=dtype, requires_grad=True) if bias else None
        t = torch.randint(0, vocab, (tokens,))
        with PeakTracker() as tracker:
            tracker.adopt(x, w, t, b)
            ring_dtp(
                x,
                w,
                t,
                ranks=LoopbackRanks(ranks),
                mode=mode,
                strip_rows=rows,
                bias=b,
                gradient_hop=hop,
            ).backward()
        bound = _bound(tokens, hidden, vocab, ranks, mode=mode, strip_rows=rows, dtype=dtype, hop=hop)
        assert tracker.peak_bytes <= bound, (mode, hop, dtype, ranks, rows, bias)


def test_fewer_rows_a_tile_are_fewer_bytes_and_the_same_loss() -> None:
    x, w = torch.randn(64, 16), torch.randn(4096, 16)
    t = torch.randint(0, 4096, (64,))
    peaks, losses = [], []
    for rows in (64, 8):
        with PeakTracker() as tracker:
            losses.append(ring_dtp(x, w, t, ranks=LoopbackRanks(1), mode="activations", strip_rows=rows))
        peaks.append(tracker.peak_bytes)
    torch.testing.assert_close(losses[0], losses[1])
    assert peaks[0] - peaks[1] >= 56 * 4096 * 4 * 0.9


def test_nothing_of_tile_size_is_kept_for_backward() -> None:
    x, w = torch.randn(64, 16, requires_grad=True), torch.randn(4096, 16, requires_grad=True)
    t = torch.randint(0, 4096, (64,))
    for mode in ("activations", "weights"):
        with PeakTracker() as tracker:
            loss = ring_dtp(x, w, t, ranks=LoopbackRanks(4), mode=mode)
            assert tracker.live_bytes <= 64 * 64
        del loss
