"""Measured times stand in for a formula only where the router is of the run's kind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest

from cost_model.samples import observations
from cost_model.step_shape import StepShape
from cost_model.workload import Workload
from tests.cost_model.clusters import cpu_cluster, small_moe
from tuner.registry import load_adapter
from tuner.replaying.table import tables
from tuner.routing.rows import with_routing
from tuner.rows.current_rows import current_rows
from tuner.rows.measured import MeasuredFronts

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


def _optimizer(dtype: str, seconds: float, tensors: int = 4) -> pd.DataFrame:
    row = {
        "operator": "stream_adamw", "provider": "flatpeak", "hardware_id": "h", "pass": "step", "repeat": 0,
        "shape_json": json.dumps({"params": 4096, "dtype": dtype, "tensors": tensors}), "seconds": seconds, "ranks": 2,
        "config_json": json.dumps({"engine": "stream", "bucket_params": 512, "staging_slots": 2}),
    }  # fmt: skip
    return pd.DataFrame([{**row, "rank": rank} for rank in range(2)])


def test_an_update_is_of_its_own_type_of_weights() -> None:
    knobs = ("stream", 512, 2, 0.0)
    frame = pd.concat([_optimizer("float32", 5.0), _optimizer("bfloat16", 1.0)])
    points = MeasuredFronts.of(frame, "h")
    assert {key[-1]: found for key, found in points.points.items()} == {4: {knobs: 5.0}, 2: {knobs: 1.0}}
    for nbytes, seconds in ((4, 5.0), (2, 1.0), (8, None)):
        work = Workload(1024, 1024, activation_bytes=nbytes)
        shape = StepShape(small_moe(), cpu_cluster(2), work, 1, 1, 1, tokens=512, accumulation_steps=1)
        sized = {
            ("stream_adamw", int(shape.params_per_rank), *key[2:]): v for key, v in points.points.items()
        }
        assert MeasuredFronts(sized).optimizer(shape).get(knobs) == seconds
    several = pd.concat([_optimizer("float32", 5.0), _optimizer("float32", 1.0, tensors=9)])
    assert list(MeasuredFronts.of(several, "h").points.values()) == [{knobs: 5.0}]


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


def test_rows_of_another_version_of_the_operator_do_not_count() -> None:
    version = load_adapter("ring_dtp").version
    now, old = (
        _head(2, 1.0).assign(operator_version=version),
        _head(4, 1.0).assign(operator_version=version - 1),
    )
    own = _head(8, 1.0).assign(operator="some.module:OWN", operator_version=9)
    kept = current_rows(pd.concat([now, old, own, _head(3, 1.0)], ignore_index=True))
    assert set(kept["ranks"]) == {2, 8, 3}
    assert {key[4] for key in MeasuredFronts.of(pd.concat([now, old]), "h").points} == {2}
    assert not MeasuredFronts.of(old, "h")
