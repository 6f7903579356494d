"""Measured times stand in for a formula only where the router is of the run's kind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest

from cost_model.samples import observations
from tuner.measured import MeasuredFronts
from tuner.replay_table import tables
from tuner.routing_rows import with_routing

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


HEAD: dict[str, Any] = {"tokens_per_rank": 64, "hidden": 32, "vocab": 128, "dtype": "float32"}


def _head(ranks: int, seconds: float, sweep_id: str | None = None, **changed: Any) -> pd.DataFrame:
    row = {
        "operator": "ring_dtp", "provider": "flatpeak", "hardware_id": "h", "shape_json": json.dumps(HEAD),
        "config_json": json.dumps({"ring_mode": "weights", "strip_rows": 16}), **changed,
    }  # fmt: skip
    rows = [
        {**row, "pass": name, "rank": rank, "repeat": repeat, "seconds": seconds, "ranks": ranks}
        for name in ("forward", "backward")
        for rank in range(ranks)
        for repeat in range(3)
    ]
    return pd.DataFrame(rows) if sweep_id is None else pd.DataFrame(rows).assign(sweep_id=sweep_id)


def _told(*frames: pd.DataFrame) -> dict[int, float]:
    """Group size to seconds of the head's one point."""
    samples = pd.concat(frames, ignore_index=True)
    points = MeasuredFronts.of(samples, "h").points
    fitted = {
        int(one.values["ranks"]): 2 * one.seconds
        for one in observations(with_routing(samples), "h")[0]
        if one.pass_name == "forward"
    }
    tabled = {one.ranks: one.points[0].latency_s for one in tables(samples, fewest=1)}
    found = {int(key[4]): value["weights", 16] for key, value in points.items()}
    assert found == fitted == tabled
    return found


def test_groups_of_two_sizes_are_two_measurements() -> None:
    assert _told(_head(2, 5.0), _head(4, 1.0)) == {2: 10.0, 4: 2.0}


def test_without_the_column_the_ranks_of_each_sweep_are_counted() -> None:
    two, four = (_head(ranks, 4.0 / ranks, f"s{ranks}").drop(columns="ranks") for ranks in (2, 4))
    assert _told(two, four) == {2: 4.0, 4: 2.0}
    # rows with the column beside rows without it: those that ship, and a database's
    assert _told(two, _head(4, 1.0, "s4")) == {2: 4.0, 4: 2.0}


def test_the_shape_s_own_group_counts_before_the_column() -> None:
    spread = json.dumps({**HEAD, "ranks": 8, "nodes": 2})
    assert _told(_head(1, 3.0, shape_json=spread)) == {8: 6.0}


def test_repeats_of_two_sweeps_are_not_ranks_of_one_another() -> None:
    found = _told(_head(2, 1.0, "a"), _head(2, 1.05, "b"), _head(2, 1.1, "c"))
    assert found == {2: pytest.approx(2.1)}


def test_a_measured_point_is_of_the_fast_mode() -> None:
    frame = _head(2, 1.0)
    frame.loc[frame["repeat"] > 0, "seconds"] = 3.0
    assert _told(frame) == {2: 2.0}
