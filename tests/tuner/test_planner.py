"""The planner's verdicts and what it says with them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cost_model.errors import RuleError
from cost_model.hf_config import load_hf_config
from cost_model.memory import memory_report
from cost_model.model_spec import ModelSpec
from cost_model.presets import preset
from cost_model.rates_default import default_cost_model
from cost_model.step import TERM_NAMES, step_time
from cost_model.topology import Fabric, Switch, Topology
from cost_model.workload import Workload
from tests.cost_model.clusters import cpu_cluster, gpu_cluster, small_moe
from tests.cost_model.sweep_rows import rows
from tuner.planning.layouts import batches
from tuner.planning.plan import Plan, PlanOptions
from tuner.planning.planner import make_plan, with_measured

MODELS = Path(__file__).parents[2] / "examples" / "models"


def model(name: str) -> ModelSpec:
    return load_hf_config(MODELS / f"{name}.json")


@cache
def planned(name: str, cluster: str, nodes: int, context: int, batch: int, mode: Any = "expected") -> Plan:
    where = preset(cluster, nodes)
    options = PlanOptions(mode=mode)
    return make_plan(model(name), where, Workload(context, batch), default_cost_model(where), options)


def small(plan_options: PlanOptions | None = None, **fixed: Any) -> Plan:
    cluster = gpu_cluster()
    work = Workload(4096, 32768)
    return make_plan(small_moe(), cluster, work, default_cost_model(cluster), plan_options, fixed=fixed)


def test_gpt_oss_20b_fits_one_h200_node() -> None:
    plan = planned("gpt-oss-20b", "hgx-h200", 1, 131072, 524288)
    assert plan.verdict == "fits"
    assert plan.what_would_fit is None
    launch = plan.launch
    assert launch.max_tokens_per_rank * 8 * launch.accumulation_steps == 524288
    assert launch.chunks == launch.max_chunks
    assert launch.chunk_tokens == math.ceil(launch.max_tokens_per_rank / launch.max_chunks)


def test_paper_667b_fits_eight_h200_nodes_in_expected_mode() -> None:
    plan = planned("paper-667b", "hgx-h200", 8, 1048576, 4194304)
    assert plan.verdict == "fits"
    assert set(plan.to_json()["memory"]["modes"]) == {"expected", "guarantee"}
    assert any("exceeds the 8 key-value heads" in warning for warning in plan.warnings)
    assert any('in guarantee mode it is "does not fit" (' in warning for warning in plan.warnings)


def test_paper_667b_does_not_fit_one_h100_node_and_says_what_would() -> None:
    plan = planned("paper-667b", "hgx-h100", 1, 1048576, 4194304)
    assert plan.verdict == "does_not_fit"
    remedy = plan.what_would_fit
    assert remedy is not None
    assert "weights_grads" in remedy["reason"]
    assert remedy["longest_context"] is None
    nodes = remedy["fewest_nodes"]
    bigger = preset("hgx-h100", nodes["nodes"])
    work = Workload(nodes["context_tokens"], nodes["global_batch_tokens"])
    again = make_plan(model("paper-667b"), bigger, work, default_cost_model(bigger))
    assert again.verdict == "fits"


def test_what_does_not_fit_is_not_said_to_fit_without_offload() -> None:
    plan = planned("deepseek-v3", "hgx-h200", 2, 131072, 524288)
    assert plan.verdict == "does_not_fit"
    assert plan.launch.host_budget_bytes == 0
    assert not any("the launch fits" in warning for warning in plan.warnings)


def test_longest_context_really_fits_and_a_longer_one_does_not() -> None:
    cluster = gpu_cluster(hbm_gib=5.0)
    work = Workload(1 << 23, 1 << 26)
    cost = default_cost_model(cluster)
    remedy = make_plan(small_moe(layers=16), cluster, work, cost).what_would_fit
    assert remedy is not None
    found = remedy["longest_context"]
    assert found is not None
    fitting = Workload(found["context_tokens"], found["global_batch_tokens"])
    assert make_plan(small_moe(layers=16), cluster, fitting, cost).verdict == "fits"
    longer = found["context_tokens"] * 5 // 4
    beyond = Workload(longer, longer * 8)
    assert (
        make_plan(small_moe(layers=16), cluster, beyond, cost, PlanOptions(remedies=False)).verdict != "fits"
    )


def test_json_has_every_promised_key_and_survives_a_round_trip() -> None:
    body = planned("gpt-oss-20b", "hgx-h200", 1, 131072, 524288).to_json()
    assert json.loads(json.dumps(body)) == body
    assert set(body) >= {
        "verdict",
        "mode",
        "model",
        "cluster",
        "workload",
        "launch",
        "memory",
        "step_time",
        "binding",
        "alternatives",
        "warnings",
        "cost_model_id",
        "provenance",
    }
    assert set(body["memory"]) >= {
        "terms",
        "bound_bytes",
        "expected_bytes",
        "phase_bytes",
        "hbm_bytes",
        "phases",
        "host_bytes_per_node",
        "host_limit_bytes",
    }
    assert set(body["step_time"]) == {"terms", "total_s", "interval_s"}
    assert tuple(body["step_time"]["terms"]) == TERM_NAMES


_STATED = ("hbm_bytes", "host_limit_bytes")


def _numbers(value: Any, pointer: str) -> list[str]:
    if isinstance(value, dict):
        return [p for key, part in value.items() for p in _numbers(part, f"{pointer}/{key}")]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return [pointer]
    return []


@pytest.mark.parametrize("mode", ["expected", "guarantee"])
def test_every_predicted_figure_has_its_provenance(mode: Any) -> None:
    body = small(PlanOptions(mode=mode)).to_json()
    pointers = _numbers(body["memory"], "/memory") + _numbers(body["step_time"], "/step_time")
    pointers += _numbers(body["binding"], "/binding")
    for place, other in enumerate(body["alternatives"]):
        figures = {key: value for key, value in other.items() if key != "launch"}
        pointers += _numbers(figures, f"/alternatives/{place}")
    needed = [p for p in pointers if not p.endswith(_STATED)]
    assert needed
    assert [p for p in needed if p not in body["provenance"]] == []
    for pointer, entry in body["provenance"].items():
        assert entry["provenance"] in ("measured", "interpolated", "transferred", "analytic"), pointer
        assert entry["low"] <= entry["high"], pointer
        assert 0 < entry["level"] < 1


def test_figures_lie_inside_their_own_intervals() -> None:
    body = planned("gpt-oss-20b", "hgx-h200", 1, 131072, 524288).to_json()
    for pointer, entry in body["provenance"].items():
        value: Any = body
        for part in pointer.strip("/").split("/"):
            value = value[int(part)] if isinstance(value, list) else value[part]
        if isinstance(value, (int, float)):
            assert entry["low"] <= value <= entry["high"], pointer


def test_plan_is_what_the_models_say_about_its_launch() -> None:
    plan = planned("gpt-oss-20b", "hgx-h200", 1, 131072, 524288)
    where = preset("hgx-h200", 1)
    work = Workload(131072, 524288)
    spec = model("gpt-oss-20b")
    assert plan.report == memory_report(spec, where, work, plan.launch, mode="expected")
    assert plan.step.total == step_time(spec, where, work, plan.launch, default_cost_model(where)).total


def test_binding_names_the_largest_live_set_and_the_next() -> None:
    plan = small()
    binding = plan.to_json()["binding"]
    totals = sorted((sum(live.values()) for live in plan.report.phases.values()), reverse=True)
    assert [binding["bytes"], binding["next"]["bytes"]] == totals[:2]
    assert binding["bytes"] == plan.report.phase_bytes
    assert sum(binding["terms"].values()) == binding["bytes"]


def test_alternatives_are_other_layouts_no_faster_than_the_plan() -> None:
    plan = small()
    layouts = {
        (
            a.launch.sequence_degree,
            a.launch.expert_degree,
            a.launch.vocab_degree,
            a.launch.max_tokens_per_rank,
        )
        for a in plan.alternatives
    }
    best = plan.launch
    assert len(layouts) == len(plan.alternatives) == 4
    assert (
        best.sequence_degree,
        best.expert_degree,
        best.vocab_degree,
        best.max_tokens_per_rank,
    ) not in layouts
    seconds = [plan.step.total.value] + [a.step_time.value for a in plan.alternatives]
    assert seconds == sorted(seconds)


def test_same_question_same_answer() -> None:
    assert small().to_json() == small().to_json()


def test_less_memory_never_makes_a_faster_plan() -> None:
    seconds = []
    for hbm in (140.0, 12.0, 8.0, 6.0):
        cluster = gpu_cluster(hbm_gib=hbm)
        plan = make_plan(
            small_moe(layers=16), cluster, Workload(131072, 1 << 20), default_cost_model(gpu_cluster())
        )
        if plan.verdict == "fits":
            seconds.append(plan.step.total.value)
    assert len(seconds) >= 2
    assert seconds == sorted(seconds)


def test_host_memory_is_a_constraint() -> None:
    cluster = gpu_cluster(hbm_gib=4.6, ram_bytes=2e12)
    poor = gpu_cluster(hbm_gib=4.6, ram_bytes=45e9)
    spec, work = small_moe(layers=32), Workload(65536, 1 << 19)
    rich_plan = make_plan(spec, cluster, work, default_cost_model(cluster))
    poor_plan = make_plan(spec, poor, work, default_cost_model(poor), PlanOptions(remedies=False))
    for plan in (rich_plan, poor_plan):
        if plan.verdict == "fits":
            assert plan.report.host_bytes_per_node <= plan.report.host_limit_bytes
    assert poor_plan.report.host_bytes_per_node <= rich_plan.report.host_bytes_per_node


def test_a_fabrics_cap_on_chunk_tokens_is_obeyed() -> None:
    # 65,535 = 3 * tokens + 1 rows at most: 21,844 tokens a chunk, 21,845 aborts every rank.
    capped = replace(preset("hgx-h200", 1), max_chunk_tokens=21844)
    plan = make_plan(model("gpt-oss-20b"), capped, Workload(131072, 524288), default_cost_model(capped))
    assert plan.launch.chunk_tokens <= 21844
    assert all(a.launch.chunk_tokens <= 21844 for a in plan.alternatives)
    with pytest.raises(RuleError, match="cap on chunk tokens"):
        make_plan(
            small_moe(),
            replace(gpu_cluster(), max_chunk_tokens=64),
            Workload(4096, 32768),
            default_cost_model(gpu_cluster()),
            fixed={"max_chunks": 1},
        )


def test_pinned_knobs_stay_where_they_were_put() -> None:
    pins: dict[str, Any] = {
        "sequence_degree": 4,
        "expert_degree": 2,
        "vocab_degree": 8,
        "max_chunks": 3,
        "dispatch_schedule": "prefetch",
        "ring_mode": "activations",
        "strip_rows": 100,
        "optimizer_engine": "stream",
        "bucket_params": 123_456,
        "staging_slots": 4,
    }
    launch = small(**pins).launch.to_json()
    assert {key: launch[key] for key in pins} == pins
    with pytest.raises(RuleError, match="launch key"):
        small(chunk_size=4)
    cluster = replace(gpu_cluster(), gpus_per_node=12)
    cost, work = default_cost_model(cluster), Workload(4096, 12 * 4096)
    with pytest.raises(RuleError, match="attention heads"):
        make_plan(small_moe(), cluster, work, cost, fixed={"sequence_degree": 3})


def test_wrong_input_names_rule_value_and_remedy() -> None:
    empty = replace(gpu_cluster(), gpus_per_node=0)
    with pytest.raises(RuleError) as raised:
        make_plan(small_moe(), empty, Workload(4096, 4096), default_cost_model(gpu_cluster()))
    assert "GPU" in raised.value.rule
    assert raised.value.remedy
    cluster = gpu_cluster(64)
    cost = default_cost_model(cluster)
    with pytest.raises(RuleError) as raised:
        make_plan(small_moe(), cluster, Workload(4096, 4096), cost)
    assert "262144 tokens" in raised.value.remedy


def test_every_batch_is_legal_and_whole() -> None:
    spec, cluster, work = model("paper-667b"), preset("hgx-h200", 8), Workload(1048576, 8388608)
    found = list(batches(spec, cluster, work, {}))
    assert found
    assert len(set(found)) == len(found)
    for batch in found:
        assert spec.attention.heads % batch.sequence_degree == 0
        assert cluster.world_size % batch.sequence_degree == 0
        assert batch.tokens * batch.sequence_degree % work.context_tokens == 0
        assert batch.tokens * cluster.world_size * batch.accumulation_steps == work.global_batch_tokens


def test_rates_of_other_hardware_are_carried_over_and_said_so() -> None:
    first, second = gpu_cluster(), gpu_cluster(sm_count=114)
    assert first.gpu.name == second.gpu.name
    own = make_plan(small_moe(), first, Workload(4096, 32768), default_cost_model(first))
    foreign = make_plan(small_moe(), second, Workload(4096, 32768), default_cost_model(first))
    assert not any("carried over" in warning for warning in own.warnings)
    assert any("carried over" in warning for warning in foreign.warnings)
    assert foreign.step.total.high / foreign.step.total.low > own.step.total.high / own.step.total.low
    assert foreign.step.total.provenance in ("transferred", "analytic")
    assert foreign.cost_model_id == default_cost_model(first).id


def test_offload_that_gains_nothing_is_not_planned() -> None:
    plan = small()
    assert plan.launch.host_budget_bytes == 0
    assert any("no gain here" in warning for warning in plan.warnings)


def test_measured_points_take_the_models_place() -> None:
    cluster = cpu_cluster()
    spec, work = small_moe(vocab=4096), Workload(2048, 8192, activation_bytes=4)
    cost = default_cost_model(cluster)
    pins = {"expert_degree": 4, "max_tokens_per_rank": 2048}
    samples = rows(cost, "pipelined_llep", noise=0.0)
    points = with_measured(samples, cluster)
    assert points
    plan = make_plan(spec, cluster, work, cost, PlanOptions(measured=points), fixed=pins)
    assert plan.launch.chunks in (1, 2, 4, 8)
    assert plan.step.terms["dispatch"].provenance == "measured"
    assert plan.to_json()["provenance"]["/step_time/terms/dispatch"]["provenance"] == "measured"
    assert plan.step.terms["head"].provenance != "measured"
    other = with_measured(rows(cost, "pipelined_llep", hardware_id="another"), cluster)
    assert not other
    assert not any("left out" in warning for warning in plan.warnings)
    doubted = make_plan(
        spec, cluster, work, cost, PlanOptions(measured=replace(other, flagged=3)), fixed=pins
    )
    assert any(
        warning.startswith("3 measured trials of this hardware are left out") for warning in doubted.warnings
    )


def test_what_was_measured_is_not_said_to_be_unmeasured() -> None:
    cluster = cpu_cluster()
    spec, work = small_moe(vocab=4096), Workload(2048, 8192, activation_bytes=4)
    prior = default_cost_model(cluster)
    fitted = replace(prior, coverage={"ring_dtp": {"hidden": (1.0, 1e6)}})  # knows the head only
    pins = {"expert_degree": 4, "max_tokens_per_rank": 2048}

    def said(options: PlanOptions) -> bool:
        plan = make_plan(spec, cluster, work, fitted, options, fixed=pins)
        return any("pipelined_llep was never measured" in warning for warning in plan.warnings)

    points = with_measured(rows(prior, "pipelined_llep", noise=0.0), cluster)
    assert said(PlanOptions())
    assert not said(PlanOptions(measured=points))


def test_guarantee_never_needs_less_than_expected() -> None:
    for name in ("gpt-oss-20b",):
        modes = planned(name, "hgx-h200", 1, 131072, 524288).to_json()["memory"]["modes"]
        assert modes["guarantee"]["footprint_bytes"] >= modes["expected"]["footprint_bytes"]


def test_a_plan_repeats_what_a_probe_noted_and_says_where_groups_cross_switches() -> None:
    fabric = Fabric((Switch("leaf1", ("n1",), "spine"), Switch("leaf2", ("n2",), "spine"), Switch("spine")))
    where = replace(gpu_cluster(), nodes=2, topology=Topology(fabric=fabric), notes=("node n2: slower",))
    work = Workload(4096, 32768)
    plan = make_plan(
        small_moe(), where, work, default_cost_model(where), fixed={"expert_degree": where.world_size}
    )
    assert "node n2: slower" in plan.warnings
    assert any("a leaf has as few as 1" in warning for warning in plan.warnings)
