"""Peaks learned from launches: measured ones scale the bound, those that ran out of memory push the rest down."""

from __future__ import annotations

import numpy as np
import pytest

from tuner.proposals.kernel import KnobKernel
from tuner.proposals.peak import Needed, chances
from tuner.space import Config, Knob, Space

SPACE = Space((Knob("chunks", (1, 2, 4, 8, 16, 32, 64), "ordered"), Knob("side", ("left", "right"))))
POINTS = list(SPACE.grid())
KERNEL = KnobKernel(SPACE, POINTS)
LIMIT = 1000


def fits(needed: list[Needed], *, bounded: bool) -> dict[tuple[int, str], float]:
    told = [(c, 4000 // int(c["chunks"]) if bounded else None) for c in POINTS]
    found = chances(KERNEL, told, needed, LIMIT)
    return {(int(c["chunks"]), str(c["side"])): float(p) for c, p in zip(POINTS, found, strict=True)}


def at(chunks: int) -> Config:
    return {"chunks": chunks, "side": "left"}


def test_a_bound_tells_where_memory_ends_before_anything_ran() -> None:
    found = fits([], bounded=True)
    assert found[1, "left"] < 0.01
    assert found[64, "left"] > 0.99
    falling = [found[c, "left"] for c in (64, 32, 16, 8, 4, 2, 1)]
    assert falling == sorted(falling, reverse=True)


def test_measured_peaks_scale_the_bound() -> None:
    low = fits([Needed(at(c), 4000 // c, 1600 // c) for c in (16, 32)], bounded=True)
    high = fits([Needed(at(c), 4000 // c, 6000 // c) for c in (16, 32)], bounded=True)
    assert low[2, "left"] > 0.9  # 2000 bytes of bound are 800 of peak
    assert high[4, "left"] < 0.1  # 1000 bytes of bound are 1500 of peak


def test_a_point_that_ran_out_of_memory_takes_its_neighbours_along() -> None:
    before, after = fits([], bounded=False), fits([Needed(at(2), None, None)], bounded=False)
    assert len({round(p, 6) for p in before.values()}) > 1 or max(before.values()) < 0.9
    assert all(after[key] < before[key] for key in before)
    assert after[64, "left"] > after[1, "left"]


def test_peaks_of_knobs_alone_show_the_way_down() -> None:
    needed = [Needed(at(2), None, None), *(Needed(at(c), None, 4000 // c) for c in (16, 64))]
    found = fits(needed, bounded=False)
    assert found[1, "left"] < 0.2
    assert found[32, "left"] > 0.95
    assert found[32, "right"] > 0.7


@pytest.mark.parametrize("lost", [1, 4, 8])
def test_chances_are_finite_however_many_points_were_lost(lost: int) -> None:
    found = np.array(list(fits([Needed(c, None, None) for c in POINTS[:lost]], bounded=False).values()))
    assert np.isfinite(found).all()
    assert ((found >= 0) & (found <= 1)).all()
