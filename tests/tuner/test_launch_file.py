"""From a plan to launch.json and back through the reader a training job uses."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

import operators.launch
from cost_model.errors import RuleError
from cost_model.launch import LaunchConfig
from cost_model.rates_default import default_cost_model
from cost_model.workload import Workload
from operators.errors import RuleError as OperatorRuleError
from operators.launch import parse_launch, read_launch
from operators.stream_adamw import OffloadStreamAdamW
from tests.cost_model.clusters import gpu_cluster, small_moe
from tuner.exporters.launch_file import export_launch
from tuner.planning.planner import make_plan

_LAUNCH = LaunchConfig(
    sequence_degree=8,
    expert_degree=8,
    vocab_degree=8,
    max_tokens_per_rank=16384,
    accumulation_steps=4,
    chunk_tokens=4096,
    max_chunks=4,
    dispatch_schedule="prefetch",
    strip_rows=2048,
    ring_mode="weights",
    host_budget_bytes=2**33,
    optimizer_engine="stream",
    bucket_params=10_000_000,
    staging_slots=3,
)


def _plan(**changes: Any) -> dict[str, Any]:
    model = {
        "name": "m",
        "hidden": 64,
        "layers": 2,
        "vocab": 128,
        "experts": 8,
        "top_k": 2,
        "expert_intermediate": 64,
    }
    body: dict[str, Any] = {
        "verdict": "fits",
        "launch": _LAUNCH.to_json(),
        "model": {**model, "total_params": 1},
        "cluster": {"hardware_id": "card-x8-0"},
    }
    return body | changes


def test_the_reader_gets_back_every_knob(tmp_path: Path) -> None:
    path = tmp_path / "launch.json"
    path.write_text(json.dumps(export_launch(_plan(id="pln_1"))))
    launch = read_launch(path)
    for name, value in asdict(_LAUNCH).items():
        assert getattr(launch, name) == value, name
    assert (launch.hardware_id, launch.plan_id) == ("card-x8-0", "pln_1")
    assert launch.chunks(16384) == _LAUNCH.chunks == 4
    with pytest.raises(OperatorRuleError, match="16384"):
        launch.check_tokens(16385)


def test_the_file_obeys_the_schema_that_ships() -> None:
    schema = json.loads(Path(operators.launch.__file__).with_name("launch.schema.json").read_text())
    jsonschema.validate(export_launch(_plan()), schema)
    assert parse_launch(export_launch(_plan())).plan_id is None


@pytest.mark.parametrize("broken", ["launch", "model", "cluster"])
def test_what_is_no_plan_is_refused_by_name(broken: str) -> None:
    plan = _plan()
    del plan[broken]
    with pytest.raises(RuleError, match=broken):
        export_launch(plan)


@pytest.mark.parametrize("engine", ["stream", "host", "split", "device"])
def test_what_is_planned_for_an_engine_is_what_the_optimizer_takes(engine: str) -> None:
    cluster, work = gpu_cluster(), Workload(4096, 32768)
    cost, fixed = default_cost_model(cluster), {"optimizer_engine": engine}
    plan = make_plan(small_moe(), cluster, work, cost, fixed=fixed).to_json()
    launch = parse_launch(export_launch(plan))
    assert launch.optimizer_engine == engine
    weight = torch.nn.Parameter(torch.zeros(8))
    optimizer = OffloadStreamAdamW(
        [weight],
        engine=launch.optimizer_engine,
        bucket_params=launch.bucket_params,
        staging_slots=launch.staging_slots,
        host_share=launch.host_share,
    )
    assert optimizer.engine == engine


def test_a_host_share_of_another_engine_is_refused_on_both_sides() -> None:
    file = export_launch(_plan())
    file["launch"] |= {"host_share": 1.0, "optimizer_engine": "host"}
    with pytest.raises(OperatorRuleError, match="host_share: it belongs to the optimizer engine split"):
        parse_launch(file)


def test_a_launch_that_does_not_fit_is_not_exported() -> None:
    with pytest.raises(RuleError, match="fits or is at risk"):
        export_launch(_plan(verdict="does_not_fit"))
