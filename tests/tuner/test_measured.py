"""Measured times stand in for a formula only where the router is of the run's kind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest

from tuner.measured import MeasuredFronts

SHAPE: dict[str, Any] = {
    "tokens_per_rank": 4096, "hidden": 64, "intermediate": 32, "experts": 16, "top_k": 2, "dtype": "bfloat16",
    "min_rows": 1,
}  # fmt: skip


def _rows(profile: str, seconds: float, chunks: int = 2) -> Iterator[dict[str, Any]]:
    for rank in range(4):
        for name in ("forward", "backward"):
            yield {
                "operator": "pipelined_llep", "provider": "flatpeak", "hardware_id": "h", "pass": name,
                "rank": rank, "repeat": 0, "seconds": seconds, "ranks": 4,
                "shape_json": json.dumps({**SHAPE, "profile": profile}),
                "config_json": json.dumps({"chunks": chunks, "dispatch_schedule": "serial"}),
            }  # fmt: skip


def _points(*rows: Iterator[dict[str, Any]]) -> dict[bool, Any]:
    frame = pd.DataFrame([row for some in rows for row in some])
    return {bool(key[-1]): found for key, found in MeasuredFronts.of(frame, "h").points.items()}


def test_a_router_whose_experts_migrate_is_kept_apart() -> None:
    found = _points(_rows("balanced", 1.0), _rows("skew:80/2", 3.0))
    assert found[False] == {(2, "serial"): (1.0, 1.0)}
    assert found[True] == {(2, "serial"): (3.0, 3.0)}


@pytest.mark.parametrize("first", [1.0, 2.0])
def test_of_two_routers_of_a_kind_the_slower_one_counts(first: float) -> None:
    found = _points(_rows("balanced", first), _rows("random", 3.0 - first))
    assert found[False] == {(2, "serial"): (2.0, 2.0)}


def test_one_chunk_has_the_schedule_serial() -> None:
    found = _points(_rows("balanced", 1.0, chunks=1))
    assert set(found[False]) == {(1, "serial")}
