"""One direction of a host link alone is faster than each of both: what one slot and a lone copy run at."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cost_model.calibration_fit import fit_operator
from cost_model.latency_host import boundary_copy_seconds, stream_seconds
from cost_model.rates import Rate, RateView
from cost_model.rates_default import default_cost_model
from cost_model.reference.machines import TWO_H200_NODE
from cost_model.sample_formulas import sample_seconds
from cost_model.samples import Observation

PARAMS = 4e8


def rates(duplex: float) -> dict[str, Rate]:
    known = dict(default_cost_model(TWO_H200_NODE).rates)
    known["host_duplex"] = Rate(duplex, duplex, duplex, "measured", "share")
    return known


def step(duplex: float, slots: int) -> float:
    return float(stream_seconds(RateView(rates(duplex)), PARAMS, 2e7, slots, 2))


def test_one_slot_uses_one_direction_at_a_time() -> None:
    assert step(0.6, 1) < 0.7 * step(1.0, 1)
    assert step(0.6, 3) == pytest.approx(step(1.0, 3), rel=0.12)


def test_a_boundary_travels_alone() -> None:
    copies = [boundary_copy_seconds(RateView(rates(d)), 4e8, 2) for d in (0.6, 1.0)]
    assert copies[0] == pytest.approx(0.6 * copies[1], rel=1e-2)


def test_a_rate_settled_by_one_operator_is_not_moved_by_the_next() -> None:
    true = rates(0.6)
    rows = []
    for offloaded in range(1, 13):
        values = {"tokens_per_rank": 69_632, "hidden": 2880, "boundaries": 13, "ranks": 2, "scalar_bytes": 2}
        values["host_budget_bytes"] = offloaded * 69_632 * 2880 * 2
        seconds = 1.3 * sample_seconds(RateView(true), "checkpoint_offload", values, "forward")
        rows.append(Observation("checkpoint_offload", "forward", values, seconds, 3, 0.0, None))
    narrow = {
        n: replace(
            r, low=r.value / 1.02, high=min(r.value * 1.02, 1.0) if r.unit == "share" else r.value * 1.02
        )
        for n, r in true.items()
    }
    name = "host_link_2_bytes_per_s"
    free, held = fit_operator(narrow, rows), fit_operator(narrow, rows, {name, "host_duplex"})
    moved = [abs(np.log(one.rates[name].value / true[name].value)) for one in (free, held)]
    assert moved[1] < 0.05
    assert moved[1] < moved[0]
