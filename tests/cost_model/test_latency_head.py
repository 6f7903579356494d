"""The gathered head as it runs: everything in forward, three matmuls, the weight there and its gradient back."""

from __future__ import annotations

import pytest

from cost_model.latency import GroupLinks, gather_seconds
from cost_model.latency_head import HeadShape, head_seconds, round_compute_seconds
from cost_model.rates_default import default_cost_model
from cost_model.reference.machines import TWO_H200

SHAPE = HeadShape(tokens=16_384, hidden=7168, vocab=200_000, vocab_ranks=2)
LINKS = GroupLinks(2, 0.5, 0.0)
RATES = default_cost_model(TWO_H200).view()


def seconds(mode: str, backward: bool, strip_rows: int = 4096) -> float:
    return float(head_seconds(RATES, SHAPE, LINKS, ring_mode=mode, strip_rows=strip_rows, backward=backward))


def test_the_gathered_heads_backward_only_scales() -> None:
    assert seconds("gather", backward=True) < 0.03 * seconds("gather", backward=False)


def test_three_matmuls_instead_of_four() -> None:
    gathered = seconds("gather", backward=False) - RATES["head_sync_s"]
    travels = sum(float(gather_seconds(RATES, LINKS, 200_000.0 * 7168 * b)) for b in (2, 4))
    forward = float(round_compute_seconds(RATES, SHAPE, 4096, backward=False))
    backward = float(round_compute_seconds(RATES, SHAPE, 4096, backward=True))
    assert gathered - travels < 2 * backward * 1.01
    assert gathered - travels > 2 * (backward + forward) * 0.7


@pytest.mark.parametrize("mode", ["gather", "weights", "activations"])
def test_more_tiles_cost_launches(mode: str) -> None:
    assert seconds(mode, backward=False, strip_rows=64) > seconds(mode, backward=False, strip_rows=4096)


def test_short_tiles_cost_a_pass_over_the_weight_gradient_each() -> None:
    few, many = (seconds("activations", backward=True, strip_rows=rows) for rows in (16_384, 1024))
    sums = 2 * 15 * 2 * 4 * 100_000 * 7168 / RATES["hbm_bytes_per_s"]
    launches = 2 * 3 * 15 * RATES["tile_s"]
    assert many - few == pytest.approx(sums + launches, rel=0.05)
