"""Latency terms: what they must reproduce, and what must never go the wrong way."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.errors import RuleError
from cost_model.latency import (
    GroupLinks,
    all_to_all_seconds,
    expert_matmul_seconds,
    host_link_bytes_per_s,
    overlapped_seconds,
    ring_hop_seconds,
)
from cost_model.latency_dispatch import ChunkTimes, DispatchShape, dispatch_seconds, pipeline_seconds
from cost_model.latency_head import HeadShape, head_seconds
from cost_model.latency_host import optimizer_seconds, stream_seconds
from cost_model.rates import CostModel, Rate
from cost_model.rates_default import default_cost_model
from tests.cost_model.clusters import cpu_cluster, gpu_cluster

RATES = default_cost_model(gpu_cluster()).view()


def _rates(**values: float) -> CostModel:
    base = default_cost_model(gpu_cluster())
    exact = {name: Rate(v, v, v, "measured", base.rates[name].unit) for name, v in values.items()}
    return base.with_rates(exact)


@pytest.mark.parametrize(("rows", "tflops"), [(43, 116), (171, 481), (683, 670)])
def test_grouped_matmul_curve_meets_the_measured_rates(rows: int, tflops: int) -> None:
    view = _rates(gemm_ceiling_flops=685e12, gemm_half_rows=250.0, expert_t0_s=1e-9).view()
    seconds = expert_matmul_seconds(view, 48.0 * rows, 48.0, 7168, 2048, flops_factor=2.0)
    rate = 48 * 2 * 7168 * 2048 * rows / float(seconds)
    assert rate == pytest.approx(tflops * 1e12, rel=0.04)


@pytest.mark.parametrize(("mib", "gb_per_s"), [(64, 238), (256, 283), (1024, 330)])
def test_all_to_all_meets_the_measured_curve(mib: int, gb_per_s: int) -> None:
    # Two ranks: half of what a rank emits leaves it.
    view = _rates(all_to_all_node_alpha_s=60e-6, all_to_all_node_bytes_per_s=330e9).view()
    links = GroupLinks(2, 0.5, 0.0)
    nbytes = mib * 2.0**20
    assert nbytes / float(all_to_all_seconds(view, links, 2 * nbytes)) == pytest.approx(
        gb_per_s * 1e9, rel=0.18
    )


def test_stream_meets_the_measured_sketch() -> None:
    # 1.6e9 parameters, 10M x 3 slots on one H200: 386.7 ms; 100M x 2 slots: 409.6 ms.
    view = _rates(
        host_link_1_bytes_per_s=50e9,
        host_copy_alpha_s=1e-6,
        copy_overlap=1.0,
        adam_device_params_per_s=1.3e11,
    ).view()
    small = float(stream_seconds(view, 1.6e9, 1e7, 3.0, 1))
    large = float(stream_seconds(view, 1.6e9, 1e8, 2.0, 1))
    assert small == pytest.approx(0.3867, rel=0.03)
    assert large == pytest.approx(0.4096, rel=0.05)
    assert float(stream_seconds(view, 4e8, 1e8, 1.0, 1)) > 1.4 * float(stream_seconds(view, 4e8, 1e8, 2.0, 1))


def test_split_engine_meets_the_measured_sketch() -> None:
    view = _rates(
        host_link_1_bytes_per_s=50e9,
        host_copy_alpha_s=1e-6,
        copy_overlap=1.0,
        adam_device_params_per_s=1.3e11,
        adam_host_params_per_s=1.6e9 / 0.565,
        split_overlap=0.47,
    ).view()
    seconds = optimizer_seconds(
        view, 1.6e9, engine="split", bucket_params=1e7, staging_slots=3.0, host_share=0.35, active=1
    )
    assert float(seconds) == pytest.approx(0.356, rel=0.03)


def test_matmul_and_all_to_all_together_took_what_was_measured() -> None:
    assert float(overlapped_seconds(30.6e-3, 7.2e-3, 0.4)) == pytest.approx(34.8e-3, rel=0.01)


def test_pipeline_of_one_chunk_is_the_sum_of_its_parts_in_every_schedule() -> None:
    times = ChunkTimes(2.0, 5.0, 3.0)
    for schedule in ("serial", "prefetch", "overlap"):
        total = pipeline_seconds(times, 1.0, schedule, host_chunk_s=0.1, plan_s=1.0, overlap=0.4)
        assert float(total) == pytest.approx(11.0)


def test_pipeline_by_hand() -> None:
    times = ChunkTimes(2.0, 5.0, 3.0)

    def total(schedule: str, host: float = 0.0) -> float:
        return float(pipeline_seconds(times, 4.0, schedule, host_chunk_s=host, plan_s=1.0, overlap=0.4))

    assert total("serial") == pytest.approx(1 + 4 * 10)
    assert total("prefetch") == pytest.approx(1 + 2 + 3 * (5 + 0.6 * 2 + 3) + 5 + 3)
    assert total("overlap") == pytest.approx(1 + 2 + 3 * (5 + 0.6 * 5) + 5 + 3)
    # A host slower than the matmul sets the pace.
    assert total("serial", host=9.0) == pytest.approx(1 + 4 * 14)


SHAPE = DispatchShape(tokens=8192, hidden=2048, intermediate=1024, experts=64, top_k=8, expert_ranks=8)
LINKS = GroupLinks(8, 7 / 8, 0.0)


def test_backward_is_solved_apart_from_forward() -> None:
    # Large enough for the matmuls to rule: eight of the eleven a chunk, three all-to-alls for two.
    shape = replace(SHAPE, tokens=1 << 18)
    for schedule in ("serial", "prefetch", "overlap"):
        chunks = np.array([1.0, 4.0, 16.0])
        forward = np.asarray(dispatch_seconds(RATES, shape, LINKS, chunks, schedule=schedule, backward=False))
        backward = np.asarray(dispatch_seconds(RATES, shape, LINKS, chunks, schedule=schedule, backward=True))
        assert np.all(backward > 1.5 * forward)
        assert np.all(backward < 8 / 3 * forward)


def test_tiny_batches_do_not_profit_from_chunks() -> None:
    shape = replace(SHAPE, tokens=128)
    seconds = dispatch_seconds(
        RATES, shape, LINKS, np.array([1.0, 2.0, 10.0]), schedule="overlap", backward=False
    )
    assert np.all(np.diff(np.asarray(seconds)) > 0)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 1 << 18),
    more=st.integers(1, 1 << 17),
    ranks=st.sampled_from([1, 2, 8]),
    chunks=st.integers(1, 64),
    schedule=st.sampled_from(["serial", "prefetch", "overlap"]),
    backward=st.booleans(),
)
def test_more_tokens_never_take_less_time(
    tokens: int, more: int, ranks: int, chunks: int, schedule: str, backward: bool
) -> None:
    links = GroupLinks(ranks, (ranks - 1) / ranks, 0.0)

    def seconds(count: int) -> float:
        shape = replace(SHAPE, tokens=count, expert_ranks=ranks)
        return float(
            dispatch_seconds(RATES, shape, links, float(chunks), schedule=schedule, backward=backward)
        )

    assert seconds(tokens + more) >= seconds(tokens) * (1 - 1e-12)


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.sampled_from([2, 4, 8]),
    rows=st.integers(64, 8192),
    mode=st.sampled_from(["weights", "activations"]),
    backward=st.booleans(),
)
def test_finer_tiles_never_take_less_time(ranks: int, rows: int, mode: str, backward: bool) -> None:
    shape = HeadShape(8192, 2048, 100_000, ranks)
    links = GroupLinks(ranks, (ranks - 1) / ranks, 0.0)

    def seconds(height: int) -> float:
        return float(
            head_seconds(RATES, shape, links, ring_mode=mode, strip_rows=float(height), backward=backward)
        )

    assert seconds(rows) >= seconds(min(8192, 2 * rows))


def test_ring_on_one_rank_has_no_hops() -> None:
    shape = HeadShape(4096, 1024, 32000, 1)
    alone = GroupLinks(1, 0.0, 0.0)
    values = {
        mode: float(head_seconds(RATES, shape, alone, ring_mode=mode, strip_rows=4096.0, backward=True))
        for mode in ("weights", "activations", "auto")
    }
    assert len(set(values.values())) == 1


def test_auto_moves_the_smaller_block() -> None:
    links = GroupLinks(8, 7 / 8, 0.0)
    for tokens, mode in ((16384, "activations"), (32768, "weights")):
        shape = HeadShape(tokens, 7168, 200_000, 8)
        chosen, named = (
            float(head_seconds(RATES, shape, links, ring_mode=m, strip_rows=4096.0, backward=False))
            for m in ("auto", mode)
        )
        assert chosen == named


def test_groups_that_leave_the_node_pay_for_the_slow_tier() -> None:
    cluster = gpu_cluster(4)
    inside, outside = GroupLinks.of(cluster, 8), GroupLinks.of(cluster, 16)
    assert inside.cluster_share == 0
    assert outside.cluster_share == pytest.approx(0.5)
    assert outside.slowest == "cluster"
    assert float(ring_hop_seconds(RATES, outside, 1e9)) > 5 * float(ring_hop_seconds(RATES, inside, 1e9))


def test_replicas_lie_as_far_apart_as_their_groups_are_long() -> None:
    cluster = gpu_cluster(2)
    assert GroupLinks.strided(cluster, 2, 8).node_share == 0
    assert GroupLinks.strided(cluster, 4, 4).node_share == pytest.approx(0.25)


def test_host_links_share_memory() -> None:
    assert (
        host_link_bytes_per_s(RATES, 1) > host_link_bytes_per_s(RATES, 2) == host_link_bytes_per_s(RATES, 8)
    )
    assert host_link_bytes_per_s(RATES, 16) == pytest.approx(host_link_bytes_per_s(RATES, 8) / 2)


def test_missing_rate_names_itself() -> None:
    with pytest.raises(RuleError, match="all_to_all_cluster_alpha_s"):
        all_to_all_seconds(default_cost_model(cpu_cluster()).view(), GroupLinks.of(gpu_cluster(2), 16), 1e6)


def test_cost_model_survives_json() -> None:
    model = default_cost_model(gpu_cluster())
    assert CostModel.from_json(json.loads(json.dumps(model.to_json()))) == model
    assert default_cost_model(gpu_cluster()).id == model.id
    assert default_cost_model(gpu_cluster(sm_count=114)).id != model.id


def test_malformed_cost_model_is_refused_with_its_rule() -> None:
    body = default_cost_model(gpu_cluster()).to_json()
    del body["rates"]
    with pytest.raises(RuleError, match="rates"):
        CostModel.from_json(body)
    with pytest.raises(RuleError, match="low <= value"):
        Rate(1.0, 2.0, 3.0, "measured", "s")


def test_estimate_names_its_weakest_source_and_grows_with_its_inputs() -> None:
    model = _rates(dense_flops=1e12)
    sharp = model.estimate(lambda r: 1e12 / r["dense_flops"])
    assert (sharp.value, sharp.low, sharp.high, sharp.provenance) == (1.0, 1.0, 1.0, "measured")
    vague = model.estimate(lambda r: 1e12 / r["dense_flops"] + r["plan_sync_s"])
    assert vague.provenance == "analytic"
    assert vague.low < vague.value < vague.high


def test_a_machine_is_the_same_however_many_cpu_ranks_it_is_cut_into() -> None:
    assert cpu_cluster(2).hardware_id == cpu_cluster(8).hardware_id
    assert replace(gpu_cluster(), gpus_per_node=4).hardware_id != gpu_cluster().hardware_id
