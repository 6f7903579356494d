"""Eq. 6: terms, live sets, verdicts; monotone where more work cannot need less memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.bounds.pipelined_llep import buffer_bytes, expected_buffer_bytes
from cost_model.cluster_spec import ClusterSpec, Figure
from cost_model.errors import RuleError
from cost_model.hf_config import load_hf_config
from cost_model.launch import LaunchConfig
from cost_model.layout import (
    legal_expert_degrees,
    legal_sequence_degrees,
    legal_vocab_degrees,
    rank_params,
)
from cost_model.memory import expected_rows, memory_report, routing_load, verdict
from cost_model.memory_attention import attention_bytes, attention_factor
from cost_model.memory_types import ALLOCATOR_TERMS, MODES, TERM_NAMES
from cost_model.presets import preset
from cost_model.workload import Workload
from operators.least_loaded import plan_least_loaded

GIB = 2**30
EXAMPLES = Path(__file__).parents[2] / "examples" / "models"
MODELS = {path.stem: load_hf_config(path) for path in sorted(EXAMPLES.glob("*.json"))}
SMALL = MODELS["gpt-oss-20b"]
NODE = preset("hgx-h200")
WORK = Workload(131072, 524288)


def launch(**changed: Any) -> LaunchConfig:
    base = LaunchConfig(
        sequence_degree=8,
        expert_degree=8,
        vocab_degree=8,
        max_tokens_per_rank=16384,
        accumulation_steps=4,
        chunk_tokens=2048,
        max_chunks=64,
        dispatch_schedule="serial",
        strip_rows=2048,
        ring_mode="auto",
        host_budget_bytes=0,
        optimizer_engine="stream",
        bucket_params=10_000_000,
        staging_slots=3,
    )
    return replace(base, **changed)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "deepseek-v3", "qwen3-30b-a3b"])
@pytest.mark.parametrize("mode", MODES)
def test_report_adds_up(name: str, mode: Any) -> None:
    report = memory_report(MODELS[name], preset("hgx-h200", 4), WORK, launch(), mode=mode)
    assert tuple(report.terms) == TERM_NAMES
    assert sum(report.terms.values()) == (
        report.bound_bytes if mode == "guarantee" else report.expected_bytes
    )
    assert all(tuple(live) == ALLOCATOR_TERMS for live in report.phases.values())
    totals = {phase: sum(live.values()) for phase, live in report.phases.items()}
    assert report.phase_bytes == max(totals.values())
    assert report.binding_phases[0][1] == report.phase_bytes
    assert report.phase_bytes <= report.footprint_bytes <= sum(report.terms.values())
    assert report.expected_bytes <= report.bound_bytes
    assert sum(report.host_terms.values()) == report.host_bytes_per_node
    assert ("forward_dense" in report.phases) == (MODELS[name].dense_layers > 0)
    body = report.to_json()
    assert body["verdict"] == report.verdict
    assert all(isinstance(value, int) for value in body["terms"].values())


def test_gpt_oss_20b_fits_one_h200_node() -> None:
    for mode in MODES:
        assert memory_report(SMALL, NODE, WORK, launch(), mode=mode).verdict == "fits"


def test_paper_667b_at_a_million_tokens_fits_64_h200_and_not_8_h100() -> None:
    work = Workload(1_048_576, 4_194_304)
    large = launch(sequence_degree=64, expert_degree=64, vocab_degree=64, host_budget_bytes=40 * GIB)
    report = memory_report(MODELS["paper-667b"], preset("hgx-h200", 8), work, large)
    assert report.verdict == "fits"
    small = launch(max_tokens_per_rank=131072, host_budget_bytes=40 * GIB)
    assert memory_report(MODELS["paper-667b"], preset("hgx-h100"), work, small).verdict == "does_not_fit"


def test_residency_is_4_theta_over_w_streamed_and_16_on_the_device() -> None:
    theta = SMALL.total_params
    streamed = memory_report(SMALL, NODE, WORK, launch()).terms["weights_grads"]
    device = memory_report(SMALL, NODE, WORK, launch(optimizer_engine="device")).terms["weights_grads"]
    assert streamed == pytest.approx(4 * theta / 8, rel=1e-6)
    assert device == pytest.approx(16 * theta / 8, rel=1e-6)


def test_replicated_experts_are_counted_once_per_copy() -> None:
    held = rank_params(SMALL, 8, 2)
    assert held.routed == pytest.approx(SMALL.routed_params / 2)
    assert held.optimizer == pytest.approx(SMALL.total_params / 8, rel=1e-6)
    report = memory_report(SMALL, NODE, WORK, launch(expert_degree=2))
    want = 4 * SMALL.routed_params / 2 + 4 * SMALL.dense_params / 8
    assert report.terms["weights_grads"] == pytest.approx(want, rel=1e-6)


def test_offloading_boundaries_moves_them_to_the_host() -> None:
    one = 69632 * 2880 * 2
    work = Workload(8 * 69632, 8 * 69632)
    kept, moved = (
        memory_report(SMALL, NODE, work, launch(max_tokens_per_rank=69632, host_budget_bytes=budget))
        for budget in (0, 47 * (one + 4096))
    )
    assert kept.terms["boundaries_resident"] == 47 * one
    assert moved.terms["boundaries_resident"] == one
    assert moved.terms["boundaries_restored"] == 2 * one
    assert kept.phase_bytes - moved.phase_bytes == 44 * one
    assert one / GIB == pytest.approx(0.37354, rel=1e-4)
    assert kept.host_terms["boundaries"] == 0
    assert moved.host_terms["boundaries"] == pytest.approx(8 * 46 * one, rel=1e-4)


def test_host_side_holds_12_bytes_a_parameter_unless_the_optimizer_is_on_the_device() -> None:
    streamed = memory_report(SMALL, NODE, WORK, launch())
    device = memory_report(SMALL, NODE, WORK, launch(optimizer_engine="device"))
    assert streamed.host_terms["optimizer_state"] == pytest.approx(12 * SMALL.total_params, rel=0.01)
    assert device.host_terms["optimizer_state"] == 0
    assert streamed.host_limit_bytes == pytest.approx(0.9 * 2e12)


def test_a_cpu_ranks_footprint_is_host_memory_too() -> None:
    cpu = replace(NODE, gpu=replace(NODE.gpu, device="cpu"))
    report = memory_report(SMALL, cpu, WORK, launch())
    assert report.host_terms["device_memory"] == 8 * report.footprint_bytes


def test_attention_factor_lies_where_the_tensors_say() -> None:
    # q, k, v, o, their exchanged copies and gradients: 8 to 16 units where heads are about as wide as H.
    assert 8 <= attention_factor(SMALL, 8) <= 16
    assert 8 <= attention_factor(MODELS["paper-667b"], 8) <= 16
    # Latent attention unfolds 128 heads of 192: counted, not assumed.
    assert 30 <= attention_factor(MODELS["deepseek-v3"], 8) <= 40
    # More ranks than key-value heads repeat them.
    assert attention_factor(SMALL, 64) > attention_factor(SMALL, 8)


def test_expected_rows_follow_the_imbalance_up_to_lambda() -> None:
    def rows(imbalance: float, **changed: Any) -> int:
        one = launch(**changed)
        return expected_rows(tokens=16384, chunks=8, top_k=4, imbalance=imbalance, launch=one)

    assert rows(1.0) == 4 * 2048
    assert rows(1.2) == -(-12 * 4 * 2048 // 10)
    assert rows(50.0) == -(-13 * 4 * 2048 // 10)
    assert rows(50.0, expert_degree=1) == 4 * 2048
    _, guests = routing_load(mode="guarantee", model=SMALL, workload=WORK, launch=launch(), chunks=8)
    assert guests == 32 - 4


def test_routing_records_of_all_layers_wait_for_backward() -> None:
    report = memory_report(SMALL, NODE, replace(WORK, imbalance=1.0), launch())
    routes = 16384 * SMALL.top_k
    for phase, live in report.phases.items():
        if not phase.endswith("_moe"):
            want = 0 if phase == "optimizer" else 24 * (24 + 12) * routes
            assert live["dispatch"] == want


def _most_guests(loads: list[int], ranks: int) -> int:
    plan = plan_least_loaded(loads, ranks, alpha=1.0, min_rows=1024, switch=1.3)
    return max(len(plan.guests(rank)) for rank in range(ranks))


@settings(max_examples=60, deadline=None)
@given(
    loads=st.lists(st.integers(0, 5000), min_size=32, max_size=32),
    ranks=st.sampled_from([1, 2, 4, 8, 16, 32]),
)
def test_no_plan_sends_more_guests_than_the_guarantee_counts(loads: list[int], ranks: int) -> None:
    one = launch(expert_degree=ranks)
    _, guests = routing_load(mode="guarantee", model=SMALL, workload=WORK, launch=one, chunks=8)
    assert _most_guests(loads, ranks) <= guests


def test_small_pieces_alone_can_bring_many_guests() -> None:
    # One rank a little over capacity with many small experts: far more guests than its rows over m.
    assert _most_guests([10] * 16 + [1] * 16, 2) >= 7


@pytest.mark.parametrize(
    ("footprint", "host", "want"),
    [
        (95, 90, "fits"),
        (96, 90, "at_risk"),
        (95, 91, "at_risk"),
        (100, 100, "at_risk"),
        (101, 1, "does_not_fit"),
        (1, 101, "does_not_fit"),
    ],
)
def test_verdicts(footprint: int, host: int, want: str) -> None:
    assert verdict(footprint, 100, host, 100) == want


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"sequence_degree": 3}, "sequence_degree"),
        ({"sequence_degree": 0}, "sequence_degree"),
        ({"expert_degree": 16}, "expert_degree"),
        ({"vocab_degree": 5}, "vocab_degree"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"max_chunks": 0}, "max_chunks"),
        ({"host_budget_bytes": -1}, "host_budget_bytes"),
        ({"host_share": 1.5}, "host_share"),
        ({"staging_slots": 0}, "staging_slots"),
    ],
)
def test_illegal_launches_are_refused(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(RuleError, match=named):
        memory_report(SMALL, NODE, WORK, launch(**changed))


def test_a_degree_must_divide_the_heads_and_the_experts() -> None:
    wide = preset("hgx-h200", 16)
    with pytest.raises(RuleError, match="attention heads"):
        memory_report(SMALL, wide, WORK, launch(sequence_degree=128))
    with pytest.raises(RuleError, match="32 experts"):
        memory_report(SMALL, wide, WORK, launch(expert_degree=64))
    assert legal_sequence_degrees(SMALL, wide, WORK) == [1, 2, 4, 8, 16, 32, 64]
    assert legal_expert_degrees(SMALL, wide) == [1, 2, 4, 8, 16, 32]
    assert legal_vocab_degrees(SMALL, wide)[-1] == 128


def test_a_fabric_may_cap_the_chunk() -> None:
    capped = replace(NODE, max_chunk_tokens=21844)
    work = Workload(8 * 43690, 8 * 43690)
    fine = launch(max_tokens_per_rank=43688, chunk_tokens=21844)
    memory_report(SMALL, capped, work, fine)
    with pytest.raises(RuleError, match="21844"):
        memory_report(SMALL, capped, work, replace(fine, max_tokens_per_rank=43690, chunk_tokens=21845))


def _phase(cluster: ClusterSpec, mode: Any, **changed: Any) -> int:
    return memory_report(SMALL, cluster, WORK, launch(**changed), mode=mode).phase_bytes


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 100_000),
    more=st.integers(0, 50_000),
    mode=st.sampled_from(MODES),
    schedule=st.sampled_from(["serial", "prefetch", "overlap"]),
    chunks=st.integers(1, 64),
)
def test_more_tokens_never_need_less_memory(
    tokens: int, more: int, mode: Any, schedule: str, chunks: int
) -> None:
    knobs = {"chunk_tokens": 1, "max_chunks": chunks, "dispatch_schedule": schedule, "ring_mode": "weights"}
    if tokens <= chunks:
        tokens += chunks
    less = _phase(NODE, mode, max_tokens_per_rank=tokens, **knobs)
    assert less <= _phase(NODE, mode, max_tokens_per_rank=tokens + more, **knobs)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(8192, 100_000),
    chunks=st.integers(2, 32),
    mode=st.sampled_from(MODES),
    schedule=st.sampled_from(["prefetch", "overlap", "serial"]),
)
def test_more_chunks_never_need_more_dispatch(tokens: int, chunks: int, mode: Any, schedule: str) -> None:
    # Twice as many: a single one more may round c_eff up. From two on: a lone chunk has nothing beside it.
    few, many = (
        memory_report(
            SMALL,
            NODE,
            WORK,
            launch(max_tokens_per_rank=tokens, chunk_tokens=1, max_chunks=k, dispatch_schedule=schedule),
            mode=mode,
        )
        for k in (chunks, 2 * chunks)
    )
    # A chunk's tables: 4 bytes an expert, and the routes that rounding c_eff up adds (places and scalars).
    tables = 2 * chunks * (4 * SMALL.experts + 20 * 8 * SMALL.top_k)
    assert many.terms["dispatch"] <= few.terms["dispatch"] + tables
    assert many.phase_bytes <= few.phase_bytes + tables


@settings(max_examples=100, deadline=None)
@given(tokens=st.integers(1, 10**6), chunks=st.integers(1, 1000), alpha=st.floats(1, 4))
def test_buffers_of_eq_1_fall_with_every_chunk(tokens: int, chunks: int, alpha: float) -> None:
    shape = {"tokens": tokens, "hidden": 2880, "top_k": 4, "expert_ranks": 8}
    assert buffer_bytes(**shape, chunks=chunks + 1) <= buffer_bytes(**shape, chunks=chunks)
    few, many = (expected_buffer_bytes(**shape, chunks=k, alpha=alpha) for k in (chunks, chunks + 1))
    assert many <= few <= buffer_bytes(**shape, chunks=chunks)


@settings(max_examples=40, deadline=None)
@given(budget=st.integers(0, 20 * GIB), more=st.integers(0, 5 * GIB))
def test_a_larger_host_budget_never_needs_more_of_the_card(budget: int, more: int) -> None:
    less = _phase(NODE, "expected", host_budget_bytes=budget)
    # One boundary alone comes back into a slot of its own: two slots are the most there are.
    assert _phase(NODE, "expected", host_budget_bytes=budget + more) <= less + 1


@settings(max_examples=40, deadline=None)
@given(bucket=st.integers(1, 10**8), slots=st.integers(1, 6), share=st.floats(0, 0.99))
def test_staging_grows_with_buckets_and_slots(bucket: int, slots: int, share: float) -> None:
    knobs = {"optimizer_engine": "split", "host_share": share}
    one = _phase(NODE, "expected", bucket_params=bucket, staging_slots=slots, **knobs)
    assert one <= _phase(NODE, "expected", bucket_params=bucket + 1, staging_slots=slots, **knobs)
    assert one <= _phase(NODE, "expected", bucket_params=bucket, staging_slots=slots + 1, **knobs)


@settings(max_examples=40, deadline=None)
@given(imbalance=st.floats(1, 100), more=st.floats(0, 10), guests=st.integers(0, 20))
def test_a_worse_router_never_needs_less_and_the_guarantee_bounds_it(
    imbalance: float, more: float, guests: int
) -> None:
    def report(value: float, held: int) -> int:
        work = Workload(131072, 524288, imbalance=value, migrated_experts=held)
        return memory_report(SMALL, NODE, work, launch()).phase_bytes

    low = report(imbalance, guests)
    assert low <= report(imbalance + more, guests + 1)
    assert low <= _phase(NODE, "guarantee")


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 10**6),
    degree=st.sampled_from([1, 2, 4, 8, 16, 32, 64]),
    name=st.sampled_from(sorted(MODELS)),
    b=st.sampled_from([2, 4]),
)
def test_attention_scales_with_tokens_and_backward_is_the_costlier(
    tokens: int, degree: int, name: str, b: int
) -> None:
    def live(n: int, direction: str) -> int:
        return attention_bytes(
            model=MODELS[name], tokens=n, sequence_degree=degree, scalar_bytes=b, direction=direction
        )

    assert live(2 * tokens, "backward") == 2 * live(tokens, "backward")
    assert live(tokens, "forward") <= live(tokens, "backward")


def test_slack_and_what_lies_outside_come_from_the_cluster() -> None:
    lean = replace(
        NODE,
        outside_allocator_bytes=Figure(GIB, "measured"),
        allocator_slack_fraction=Figure(0.0, "measured"),
    )
    report = memory_report(SMALL, lean, WORK, launch())
    assert report.footprint_bytes == report.phase_bytes + GIB
