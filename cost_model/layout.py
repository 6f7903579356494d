"""How a launch lays a model out over a cluster: what each rank holds, and which layouts are legal (theory 1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cost_model.bounds.pipelined_llep import chunk_count
from cost_model.cluster_spec import ClusterSpec
from cost_model.errors import RuleError
from cost_model.launch import LaunchConfig
from cost_model.model_spec import ModelSpec
from cost_model.workload import Workload


@dataclass(frozen=True, slots=True)
class RankParams:
    """Parameters on one rank."""

    dense: int
    """Resident share of everything that is not a routed expert: ZeRO-3 over all W."""
    routed: int
    """Routed experts hosted: all of them over E_p, so W/E_p copies exist when E_p < W."""
    optimizer: int
    """Parameters the rank's optimizer updates: Theta/W, copies of an expert share the work."""


def rank_params(model: ModelSpec, world: int, expert_degree: int) -> RankParams:
    """What one of ``world`` ranks holds when experts are spread over ``expert_degree`` ranks."""
    return RankParams(
        dense=-(-model.dense_params // world),
        routed=-(-model.routed_params // expert_degree),
        optimizer=-(-model.total_params // world),
    )


def divisors(number: int) -> Iterator[int]:
    """Divisors of a positive number, rising."""
    return (d for d in range(1, number + 1) if number % d == 0)


def legal_sequence_degrees(model: ModelSpec, cluster: ClusterSpec, workload: Workload) -> list[int]:
    """D: divides W and the heads, and cuts the context into whole tokens."""
    heads, world = model.attention.heads, cluster.world_size
    return [d for d in divisors(world) if heads % d == 0 and workload.context_tokens % d == 0]


def legal_expert_degrees(model: ModelSpec, cluster: ClusterSpec) -> list[int]:
    """E_p: divides W and the experts."""
    return [d for d in divisors(cluster.world_size) if model.experts % d == 0]


def legal_vocab_degrees(model: ModelSpec, cluster: ClusterSpec) -> list[int]:
    """P: divides W; a vocabulary it does not divide is padded, one with fewer rows than ranks is not cut so far."""
    return [d for d in divisors(cluster.world_size) if d <= model.vocab]


def check_launch(model: ModelSpec, cluster: ClusterSpec, launch: LaunchConfig) -> None:
    """Refuse a launch that cannot be laid out.

    Raises:
        RuleError: a degree does not divide what it must, or a knob is out of range.
    """
    world = cluster.world_size
    for name, degree in (
        ("sequence_degree", launch.sequence_degree),
        ("expert_degree", launch.expert_degree),
        ("vocab_degree", launch.vocab_degree),
    ):
        if degree < 1 or world % degree:
            raise RuleError(
                rule=f"{name} must divide the {world} ranks of the cluster",
                value=degree,
                remedy=f"Use one of {', '.join(map(str, divisors(world)))}.",
            )
    if model.attention.heads % launch.sequence_degree:
        raise RuleError(
            rule=f"sequence_degree must divide the {model.attention.heads} attention heads",
            value=launch.sequence_degree,
            remedy="Ranks of a sequence group swap sequence for whole heads; use a divisor of both.",
        )
    if model.experts % launch.expert_degree:
        raise RuleError(
            rule=f"expert_degree must divide the {model.experts} experts",
            value=launch.expert_degree,
            remedy="Every rank of an expert group hosts equally many; use a divisor of both.",
        )
    for name, value, least in (
        ("max_tokens_per_rank", launch.max_tokens_per_rank, 1),
        ("chunk_tokens", launch.chunk_tokens, 1),
        ("max_chunks", launch.max_chunks, 1),
        ("strip_rows", launch.strip_rows, 1),
        ("host_budget_bytes", launch.host_budget_bytes, 0),
        ("bucket_params", launch.bucket_params, 1),
        ("staging_slots", launch.staging_slots, 1),
    ):
        if value < least:
            raise RuleError(rule=f"{name} must be at least {least}", value=value, remedy="Raise it.")
    if not 0 <= launch.host_share <= 1:
        raise RuleError(
            rule="host_share is a share from 0 to 1", value=launch.host_share, remedy="Use for example 0.35."
        )
    if launch.host_share and launch.optimizer_engine != "split":
        raise RuleError(
            rule="host_share belongs to the optimizer engine split",
            value=f"{launch.host_share:g} with {launch.optimizer_engine}",
            remedy="Set optimizer_engine to split, or host_share to 0.",
        )
    cap = cluster.max_chunk_tokens
    if cap is not None and effective_chunk_tokens(launch) > cap:
        raise RuleError(
            rule=f"a chunk may hold at most {cap} tokens of a rank on {cluster.name}",
            value=effective_chunk_tokens(launch),
            remedy="Lower chunk_tokens or raise max_chunks; the fabric's dispatcher addresses no more.",
        )


def effective_chunk_tokens(launch: LaunchConfig) -> int:
    """c_eff at N = N_max (Eq. 1)."""
    chunks = chunk_count(
        tokens_max=launch.max_tokens_per_rank,
        chunk_tokens=launch.chunk_tokens,
        max_chunks=launch.max_chunks,
    )
    return -(-launch.max_tokens_per_rank // chunks)
