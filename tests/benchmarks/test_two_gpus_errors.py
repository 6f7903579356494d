"""The joined model: one GPU's rates with two cards' links, and its errors on rows it has not seen."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
import pytest

from benchmarks.two_gpus_errors import errors, joined_model, one_gpu_fit, summary, table
from cost_model.sample_formulas import sample_seconds
from tuner.routing.rows import with_routing

LAYER: dict[str, Any] = {
    "tokens_per_rank": 4096,
    "hidden": 1024,
    "intermediate": 512,
    "experts": 32,
    "top_k": 8,
}
LAYER |= {"dtype": "bfloat16", "min_rows": 1}


def sample_rows(seconds_per_chunk: float, profile: str = "balanced") -> pd.DataFrame:
    """Two ranks, three repeats of three launches; rank 1 is the slower one."""
    rows: list[dict[str, Any]] = []
    for chunks in (1, 4, 8):
        for rank in (0, 1):
            for repeat in range(3):
                config = {"chunks": chunks, "dispatch_schedule": "serial"}
                row = {"operator": "pipelined_llep", "provider": "flatpeak", "pass": "forward"}
                row |= {
                    "shape_json": json.dumps(LAYER | {"profile": profile}),
                    "config_json": json.dumps(config),
                }
                seconds = chunks * seconds_per_chunk * (1.0 + 0.01 * rank)
                rows.append({**row, "rank": rank, "repeat": repeat, "seconds": seconds, "hardware_id": "two"})
    return pd.DataFrame(rows)


def test_one_gpus_rows_are_fitted_closely() -> None:
    held_out = {one.operator: one.median_error for one in one_gpu_fit().report.operators}
    assert held_out["pipelined_llep"] < 0.05
    assert held_out["ring_dtp"] < 0.05


def test_links_come_from_the_two_cards_and_compute_from_the_one() -> None:
    alone, joined = one_gpu_fit().cost_model, joined_model("two")
    assert joined.rates["gemm_ceiling_flops"] == alone.rates["gemm_ceiling_flops"]
    assert joined.rates["all_to_all_node_bytes_per_s"].value == pytest.approx(330e9)
    assert joined.hardware_id == "two"
    assert joined.parent_id == alone.id


def test_a_skewed_router_becomes_numbers() -> None:
    frame = with_routing(sample_rows(1e-3, "skew:80/16"))
    shape = json.loads(frame["shape_json"].iloc[0])
    assert shape["migrated_experts"] > 0
    assert 1.0 <= shape["imbalance"] < 1.3
    balanced = json.loads(with_routing(sample_rows(1e-3))["shape_json"].iloc[0])
    assert (balanced["migrated_experts"], balanced["imbalance"]) == (0, 1.0)


def test_errors_are_logs_of_predicted_over_the_slowest_rank() -> None:
    cost = joined_model("two")
    rows = errors(cost, sample_rows(1e-3))
    assert len(rows) == 3
    for row in rows:
        values = LAYER | {"chunks": row["chunks"], "ranks": 2, "scalar_bytes": 2}
        expected = sample_seconds(cost.view(), "pipelined_llep", values, "forward")
        assert row["predicted_s"] == pytest.approx(expected)
        assert row["measured_s"] == pytest.approx(1.01e-3 * row["chunks"])
    (line,) = summary(rows)
    assert line["configurations"] == 3
    assert line["largest_error"] >= line["median_error"]
    report = {"before": [line], "after": [line], "refit": {"operators": []}}
    assert "pipelined_llep" in table(report)[1]
