"""Time of one PipelinedLLEP layer: forward and backward pipelines, solved apart (their best K can differ)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cost_model.latency import (
    GroupLinks,
    Number,
    all_to_all_seconds,
    dense_seconds,
    expert_matmul_seconds,
    overlapped_seconds,
)
from cost_model.rates import RateView


@dataclass(frozen=True, slots=True)
class DispatchShape:
    """One MoE layer as a rank sees it (theory: N, H, I, E, k, E_p, b)."""

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    expert_ranks: int
    scalar_bytes: int = 2
    imbalance: float = 1.0
    """Rows of the fullest rank over the mean, after load balancing."""
    send_ratio: float = 1.0
    """Largest send of a pair over the mean send (rho)."""
    migrated_experts: int = 0
    matrices: int = 3
    """Matrices of an expert: gate, up and down; 2 where nothing gates."""

    @property
    def local_experts(self) -> float:
        """Experts a rank computes, guests included."""
        return self.experts / self.expert_ranks + self.migrated_experts


@dataclass(frozen=True, slots=True)
class ChunkTimes:
    """Seconds of one chunk, each activity alone."""

    links_in: Number
    experts: Number
    links_out: Number


def effective_chunk(tokens: int, chunks: Number) -> Number:
    """c_eff = ceil(N/K): tokens a source really puts in a chunk."""
    return np.ceil(tokens / np.asarray(chunks, dtype=np.float64))


def chunk_times(
    rates: RateView, shape: DispatchShape, links: GroupLinks, chunks: Number, backward: bool
) -> ChunkTimes:
    """Links in, matmuls with their gathers and scatters, links out, of one chunk.

    Forward sends rows out and results back. Backward sends rows and output gradients out and row gradients back:
    three all-to-alls, and eight of the eleven matmuls.
    """
    emitted = shape.top_k * effective_chunk(shape.tokens, chunks)
    row_bytes = shape.hidden * shape.scalar_bytes
    one_way = all_to_all_seconds(rates, links, shape.send_ratio * emitted * row_bytes)
    rows = emitted * shape.imbalance
    passes = rates["route_passes"] * (1.6 if backward else 1.0)
    moved = passes * rows * row_bytes / rates["hbm_bytes_per_s"]
    matmul = expert_matmul_seconds(
        rates,
        rows,
        shape.local_experts,
        shape.hidden,
        shape.intermediate,
        flops_factor=2.0 * ((3 * shape.matrices - 1) if backward else shape.matrices),
    )
    inward = 2.0 * one_way if backward else one_way
    return ChunkTimes(inward, matmul + moved, one_way)


def pipeline_seconds(
    times: ChunkTimes, chunks: Number, schedule: str, *, host_chunk_s: float, plan_s: Number, overlap: float
) -> Number:
    """T = T_plan + t_d + (K-1)*period + y + t_c with y = max(t_e, t_h) and the period of the schedule.

    ``serial``: x + y. ``prefetch``: only the next chunk's dispatch overlaps the matmul. ``overlap``: the return of
    the last one too; both use the same links, so their times add (x = t_d + t_c).
    """
    busy = np.maximum(times.experts, host_chunk_s)
    if schedule == "serial":
        period = times.links_in + times.links_out + busy
    elif schedule == "prefetch":
        period = overlapped_seconds(times.links_in, busy, overlap) + times.links_out
    else:
        period = overlapped_seconds(times.links_in + times.links_out, busy, overlap)
    return (
        plan_s
        + times.links_in
        + (np.asarray(chunks, dtype=np.float64) - 1.0) * period
        + busy
        + times.links_out
    )


def dispatch_seconds(
    rates: RateView, shape: DispatchShape, links: GroupLinks, chunks: Number, *, schedule: str, backward: bool
) -> Number:
    """One layer's forward or backward; ``chunks`` may be an array of K.

    Migrated experts' weights travel once a pass, and in backward their gradients return as well.
    """
    times = chunk_times(rates, shape, links, chunks, backward)
    plan: Number = rates["plan_sync_s"] + dense_seconds(
        rates, (4.0 if backward else 2.0) * shape.tokens * shape.hidden * shape.experts
    )
    if shape.migrated_experts and shape.expert_ranks > 1:
        weights = (
            float(shape.migrated_experts)
            * shape.matrices
            * shape.hidden
            * shape.intermediate
            * shape.scalar_bytes
        )
        trips = 2.0 if backward else 1.0
        plan = plan + trips * all_to_all_seconds(rates, links, weights)
    return pipeline_seconds(
        times, chunks, schedule, host_chunk_s=rates["host_chunk_s"], plan_s=plan, overlap=rates["overlap"]
    )
