"""One rank plays its part of a group that is not there: true memory and compute, no links, and its rows say so."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cost_model.errors import RuleError
from cost_model.rates_default import default_cost_model
from cost_model.sample_formulas import sample_seconds
from db.lifecycle import SweepState
from db.repositories import SampleRepository, TrialRepository
from db.session import Database
from tests.cost_model.clusters import gpu_cluster
from tuner.executors.local import LocalExecutor
from tuner.replaying.table import tables
from tuner.rows.measured import MeasuredFronts
from tuner.sweeping.sweep import create_sweep, parse_sweep, run_sweep

DISPATCH: dict[str, Any] = {
    "operator": "pipelined_llep",
    "target": {"ranks": 1, "loopback": 4},
    "shape": {"tokens_per_rank": 64, "hidden": 32, "intermediate": 16, "experts": 8, "top_k": 2},
    "space": {"chunks": [1, 4], "dispatch_schedule": ["serial"]},
}
HEAD: dict[str, Any] = {
    "operator": "ring_dtp",
    "target": {"ranks": 1, "loopback": 4},
    "shape": {"tokens_per_rank": 64, "hidden": 32, "vocab": 256},
    "space": {"ring_mode": ["weights", "activations", "gather"], "strip_rows": [16, 64]},
}


@pytest.mark.parametrize("sweep", [DISPATCH, HEAD], ids=["dispatch", "head"])
def test_rows_carry_the_size_of_the_group_and_that_it_was_not_there(
    database: Database, executor: LocalExecutor, sweep: dict[str, Any]
) -> None:
    sweep_id = create_sweep(database, parse_sweep(sweep))
    assert run_sweep(database, sweep_id, executor).state == SweepState.SUCCEEDED
    with database.reading() as session:
        trials = TrialRepository(session).of_sweep(sweep_id)
        frame = SampleRepository(session).frame(sweep_id=sweep_id)
    for trial in trials:
        assert trial.peak_bytes is not None
        assert trial.bound_bytes is not None
        assert trial.peak_bytes <= trial.bound_bytes
    shapes = [json.loads(text) for text in frame["shape_json"]]
    assert all((one["ranks"], one["loopback"]) == (4, True) for one in shapes)
    assert set(frame["rank"]) == {0}
    (table,) = tables(frame)
    assert table.ranks == 4
    bounds = {json.dumps(t.config_json, sort_keys=True): t.bound_bytes for t in trials}
    assert {json.dumps(p.config, sort_keys=True): p.bound_bytes for p in table.points} == bounds
    hardware = str(frame["hardware_id"].iloc[0])
    assert not MeasuredFronts.of(frame, hardware)


def test_a_rank_in_loopback_holds_its_share_of_the_experts(
    database: Database, executor: LocalExecutor
) -> None:
    alone = {**DISPATCH, "target": {"ranks": 1}}
    peaks = []
    for sweep in (alone, DISPATCH):
        sweep_id = create_sweep(database, parse_sweep(sweep))
        run_sweep(database, sweep_id, executor)
        with database.reading() as session:
            trials = TrialRepository(session).of_sweep(sweep_id)
        peaks.append({t.config_json["chunks"]: t.result_json["base_bytes"] for t in trials if t.result_json})
    expert = 3 * 32 * 16 * 4
    assert peaks[0][1] - peaks[1][1] == (8 - 2) * expert


@pytest.mark.parametrize("operator", ["stream_adamw", "checkpoint_offload"])
def test_an_operator_without_peers_has_no_loopback(database: Database, operator: str) -> None:
    shape = (
        {"params": 4096}
        if operator == "stream_adamw"
        else {"tokens_per_rank": 16, "hidden": 16, "boundaries": 3}
    )
    with pytest.raises(RuleError, match="loopback"):
        create_sweep(
            database,
            parse_sweep({"operator": operator, "target": {"ranks": 1, "loopback": 2}, "shape": shape}),
        )


@pytest.mark.parametrize("target", [{"ranks": 2, "loopback": 4}, {"ranks": 1, "loopback": 1}])
def test_loopback_is_one_rank_of_several(target: dict[str, int]) -> None:
    with pytest.raises(RuleError, match="loopback"):
        parse_sweep({**DISPATCH, "target": target})


@pytest.mark.parametrize("operator", ["pipelined_llep", "ring_dtp"])
def test_the_formula_of_a_rank_in_loopback_has_no_link_in_it(operator: str) -> None:
    values: dict[str, Any] = {
        "tokens_per_rank": 8192, "hidden": 4096, "intermediate": 2048, "experts": 64, "top_k": 8,
        "vocab": 128_000, "ranks": 8, "scalar_bytes": 2, "chunks": 4, "dispatch_schedule": "serial",
        "ring_mode": "weights", "strip_rows": 2048,
    }  # fmt: skip
    cost = default_cost_model(gpu_cluster())
    there, alone = cost.view(), cost.view()
    apart = sample_seconds(there, operator, values, "forward")
    assert sample_seconds(alone, operator, values | {"loopback": True}, "forward") != apart
    links = {name for name in there.used if name.startswith(("all_to_all_", "ring_"))}
    assert links
    assert not links & alone.used
