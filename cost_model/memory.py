"""Memory of one launch: Eq. 6 term by term, in both modes, with the phase estimate and the host side.

The closed form is the sum of every term's largest value, so it bounds every live set; the phase estimate is
the largest sum that is really alive at one time (theory 6). F adds what lies outside the allocator and the
allocator's slack to the phase peak.
"""

from __future__ import annotations

from cost_model.bounds.checkpoint_offload import boundary_bytes, locked_bytes
from cost_model.bounds.pipelined_llep import chunk_count, effective_chunk
from cost_model.bounds.stream_adamw import host_bytes
from cost_model.cluster_spec import ClusterSpec
from cost_model.launch import LaunchConfig
from cost_model.layout import check_launch, rank_params
from cost_model.memory_live import (
    attention_live,
    boundary_live,
    dispatch_live,
    head_live,
    merge,
    offloaded_boundaries,
    optimizer_live,
    resident_live,
    totals,
)
from cost_model.memory_types import (
    ALLOCATOR_TERMS,
    HOST_RAM_SHARE,
    MODES,
    MemoryReport,
    Mode,
    VerdictName,
    verdict,
)
from cost_model.model_spec import ModelSpec
from cost_model.workload import Workload

__all__ = [
    "MODES",
    "MemoryReport",
    "Mode",
    "VerdictName",
    "expected_rows",
    "footprint_bytes",
    "host_terms",
    "memory_report",
    "routing_load",
    "verdict",
]

PROCESS_BYTES = {"cuda": 4 * 2**30, "cpu": 2**28}
"""Assumed resident host memory of one rank's process: interpreter, libraries, driver mappings, data loading."""


def expected_rows(*, tokens: int, chunks: int, top_k: int, imbalance: float, launch: LaunchConfig) -> int:
    """Rows a rank is expected to receive per chunk: max(alpha, min(imbalance, lambda)) * k * c_eff.

    Up to lambda plain expert parallelism runs and shows the router's own imbalance; above it the plan holds a
    rank to alpha over the whole batch, and strided chunks stay within lambda of their share of it. No rank
    can receive more than the whole group sends.
    """
    load = max(launch.alpha, min(imbalance, launch.lambda_))
    chunk_routes = top_k * effective_chunk(tokens, chunks)
    return min(launch.expert_degree * chunk_routes, _ceil(load * chunk_routes))


def routing_load(
    *, mode: Mode, model: ModelSpec, workload: Workload, launch: LaunchConfig, chunks: int
) -> tuple[int | None, int]:
    """(rows received per chunk, experts held as guests) that a mode counts with.

    The guarantee leaves the rows to the operator's own bound and counts every expert a rank does not host as a
    guest: an expert's last piece may be a single row, so nothing less holds for any router.
    """
    if mode == "expected":
        rows = expected_rows(
            tokens=launch.max_tokens_per_rank,
            chunks=chunks,
            top_k=model.top_k,
            imbalance=workload.imbalance,
            launch=launch,
        )
        return rows, workload.migrated_experts
    foreign = model.experts - model.experts // launch.expert_degree
    return None, min(foreign, launch.expert_degree * model.top_k * launch.max_tokens_per_rank)


def host_terms(
    *, model: ModelSpec, cluster: ClusterSpec, workload: Workload, launch: LaunchConfig
) -> dict[str, int]:
    """Host bytes of one node: masters and moments, locked boundaries, processes."""
    ranks = cluster.gpus_per_node
    offloaded = offloaded_boundaries(
        model=model,
        tokens=launch.max_tokens_per_rank,
        host_budget_bytes=launch.host_budget_bytes,
        scalar_bytes=workload.activation_bytes,
    )
    optimizer = host_bytes(
        params=rank_params(model, cluster.world_size, launch.expert_degree).optimizer,
        bucket_params=launch.bucket_params,
        staging_slots=launch.staging_slots,
        engine=launch.optimizer_engine,
        host_share=launch.host_share,
    )
    one = boundary_bytes(
        tokens=launch.max_tokens_per_rank, hidden=model.hidden, scalar_bytes=workload.activation_bytes
    )
    locked = locked_bytes(boundary_bytes=one, offloaded=offloaded)
    return {
        "optimizer_state": ranks * optimizer,
        "boundaries": ranks * locked,
        "base": ranks * PROCESS_BYTES[cluster.gpu.device],
    }


def footprint_bytes(phase_bytes: int, cluster: ClusterSpec) -> int:
    """F: phase peak + what lies outside the allocator + allocator slack."""
    return phase_bytes + outside_bytes(cluster) + slack_bytes(phase_bytes, cluster)


def outside_bytes(cluster: ClusterSpec) -> int:
    """Device context, collective libraries, library workspaces; nothing of the kind on CPU ranks but buffers."""
    return int(cluster.outside_allocator_bytes.value)


def slack_bytes(phase_bytes: int, cluster: ClusterSpec) -> int:
    """Reserved minus allocated that a peak of this size is expected to leave."""
    return int(cluster.allocator_slack_fraction.value * phase_bytes)


def live_sets(
    model: ModelSpec, cluster: ClusterSpec, workload: Workload, launch: LaunchConfig, mode: Mode
) -> dict[str, dict[str, int]]:
    """Every phase's live set under the allocator's term names."""
    tokens, b, world = launch.max_tokens_per_rank, workload.activation_bytes, cluster.world_size
    chunks = chunk_count(tokens_max=tokens, chunk_tokens=launch.chunk_tokens, max_chunks=launch.max_chunks)
    rows, guests = routing_load(mode=mode, model=model, workload=workload, launch=launch, chunks=chunks)
    received, _ = routing_load(mode=mode, model=model, workload=workload, launch=launch, chunks=1)
    if received is None:
        received = launch.expert_degree * model.top_k * tokens
    return merge(
        model,
        (
            resident_live(
                model=model,
                world=world,
                expert_degree=launch.expert_degree,
                vocab_degree=launch.vocab_degree,
                engine=launch.optimizer_engine,
                scalar_bytes=b,
            ),
            attention_live(
                model=model, tokens=tokens, sequence_degree=launch.sequence_degree, scalar_bytes=b
            ),
            dispatch_live(
                model=model,
                tokens=tokens,
                expert_degree=launch.expert_degree,
                chunks=chunks,
                schedule=launch.dispatch_schedule,
                scalar_bytes=b,
                rows_per_chunk=rows,
                received_rows=received,
                migrated_experts=guests,
            ),
            head_live(
                model=model,
                tokens=tokens,
                world=world,
                vocab_degree=launch.vocab_degree,
                ring_mode=launch.ring_mode,
                strip_rows=launch.strip_rows,
                scalar_bytes=b,
            ),
            boundary_live(
                model=model, tokens=tokens, host_budget_bytes=launch.host_budget_bytes, scalar_bytes=b
            ),
            optimizer_live(
                model=model,
                world=world,
                expert_degree=launch.expert_degree,
                engine=launch.optimizer_engine,
                bucket_params=launch.bucket_params,
                staging_slots=launch.staging_slots,
                host_share=launch.host_share,
            ),
        ),
    )


def memory_report(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    launch: LaunchConfig,
    *,
    mode: Mode = "expected",
) -> MemoryReport:
    """Predict the memory of one launch.

    Args:
        model: the model's shape.
        cluster: cards and hosts.
        workload: context, batch and the router's expected imbalance.
        launch: degrees and knobs.
        mode: ``expected`` counts the router the workload describes, ``guarantee`` any router.

    Returns:
        Terms, phases, footprint and host use, in bytes.

    Raises:
        RuleError: the launch cannot be laid out on this cluster.
    """
    workload.check_model(model.experts)
    check_launch(model, cluster, launch)
    phases = live_sets(model, cluster, workload, launch, mode)
    peak = max(totals(phases).values())
    terms = _closed_form(phases, peak, cluster)
    other: Mode = "guarantee" if mode == "expected" else "expected"
    other_phases = live_sets(model, cluster, workload, launch, other)
    other_sum = sum(_closed_form(other_phases, max(totals(other_phases).values()), cluster).values())
    own_sum = sum(terms.values())
    footprint = footprint_bytes(peak, cluster)
    host = host_terms(model=model, cluster=cluster, workload=workload, launch=launch)
    if cluster.gpu.device == "cpu":
        # A CPU rank's "device" memory is the node's memory.
        host["device_memory"] = cluster.gpus_per_node * footprint
    return MemoryReport(
        mode=mode,
        terms=terms,
        bound_bytes=own_sum if mode == "guarantee" else other_sum,
        expected_bytes=own_sum if mode == "expected" else other_sum,
        phase_bytes=peak,
        phases=phases,
        footprint_bytes=footprint,
        hbm_bytes=int(cluster.gpu.hbm_bytes.value),
        host_terms=host,
        host_bytes_per_node=sum(host.values()),
        host_limit_bytes=int(HOST_RAM_SHARE * cluster.host.ram_bytes.value),
    )


def _closed_form(phases: dict[str, dict[str, int]], peak: int, cluster: ClusterSpec) -> dict[str, int]:
    terms = {name: max(live[name] for live in phases.values()) for name in ALLOCATOR_TERMS}
    terms["outside_allocator"] = outside_bytes(cluster)
    terms["allocator_slack"] = slack_bytes(peak, cluster)
    return terms


def _ceil(value: float) -> int:
    whole = int(value)
    return whole if whole == value else whole + 1
