"""Where the peak is decides whether offloading lowers it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.checkpoint_offload_gain import Phase, expected_gain_bytes, offload_gain
from operators.errors import RuleError

_B = 100


def _step(blocks: int, work: int, optimizer: int) -> list[Phase]:
    """A step that keeps all boundaries; ``work`` bytes inside a block, in backward twice as much."""
    forward = [Phase("forward", work + (i + 1) * _B, i) for i in range(blocks)]
    backward = [Phase("backward", 2 * work + (i + 1) * _B, i) for i in range(blocks)]
    return [*forward, *backward, Phase("head", blocks * _B + work), Phase("other", optimizer)]


def test_a_peak_in_backward_falls_by_all_but_what_comes_back() -> None:
    # the peak is the last block's backward: of 10 boundaries 9 are away, one of them on its way back
    assert expected_gain_bytes(_step(10, 50, 0), boundary_bytes=_B, boundaries=10, offloaded=9) == 8 * _B
    # with few away, the blocks after them never see one come back
    assert expected_gain_bytes(_step(10, 50, 0), boundary_bytes=_B, boundaries=10, offloaded=3) == 3 * _B


def test_no_gain_where_the_optimizer_or_a_first_block_is_the_peak() -> None:
    gain = offload_gain(_step(10, 50, 5000), boundary_bytes=_B, boundaries=10, offloaded=9)
    assert gain.gain_bytes == 0
    assert str(gain).startswith("no gain here: the peak (5000 bytes) is in other")
    # a short sequence and a wide MLP in the first block only
    wide = [Phase("forward", 100_000, 0), *_step(10, 50, 0)]
    gain = offload_gain(wide, boundary_bytes=_B, boundaries=10, offloaded=9)
    assert "forward of block 0" in str(gain)


def test_the_gain_ends_where_another_phase_binds() -> None:
    gain = offload_gain(_step(10, 50, 500), boundary_bytes=_B, boundaries=10, offloaded=9)
    assert (gain.before_bytes, gain.after_bytes) == (1100, 500)
    assert "falls by 600" in str(gain)
    assert gain.binding_after.kind == "other"


@given(blocks=st.integers(1, 12), work=st.integers(0, 3000), optimizer=st.integers(0, 5000))
def test_more_budget_never_raises_the_peak_by_more_than_what_comes_back(
    blocks: int, work: int, optimizer: int
) -> None:
    phases = _step(blocks, work, optimizer)
    gains = [
        expected_gain_bytes(phases, boundary_bytes=_B, boundaries=blocks, offloaded=n) for n in range(blocks)
    ]
    assert gains[0] == 0
    for n, gain in enumerate(gains):
        assert 0 <= gain <= n * _B
    assert all(after >= before - _B for before, after in pairwise(gains))


def test_wrong_counts_are_refused() -> None:
    with pytest.raises(RuleError, match="last one stays"):
        expected_gain_bytes(_step(3, 1, 1), boundary_bytes=_B, boundaries=3, offloaded=3)
    with pytest.raises(RuleError, match="at least one phase"):
        expected_gain_bytes([], boundary_bytes=_B, boundaries=3, offloaded=1)
