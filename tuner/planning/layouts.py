"""Legal layouts: degrees (D, E_p, P), tokens of a micro-batch, accumulation steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cost_model.cluster_spec import ClusterSpec
from cost_model.errors import RuleError
from cost_model.model_spec import ModelSpec
from cost_model.workload import Workload

MAX_BATCHES = 64
"""Micro-batch sizes weighed per sequence degree. Batches of everyday size have fewer divisors and lose none."""


@dataclass(frozen=True, slots=True, order=True)
class Batch:
    """A sequence group and the micro-batch it runs: N tokens per rank, ``accumulation_steps`` of them a step."""

    sequence_degree: int
    tokens: int
    accumulation_steps: int


def divisors(value: int) -> list[int]:
    """All divisors, rising."""
    small = [d for d in range(1, int(value**0.5) + 1) if value % d == 0]
    return sorted({*small, *(value // d for d in small)})


def spread(sizes: list[int]) -> list[int]:
    """At most ``MAX_BATCHES`` of rising sizes, evenly by rank, the least and the greatest among them."""
    if len(sizes) <= MAX_BATCHES:
        return sizes
    last = len(sizes) - 1
    return [sizes[round(i * last / (MAX_BATCHES - 1))] for i in range(MAX_BATCHES)]


def check_cluster(cluster: ClusterSpec) -> None:
    """Refuses a cluster without cards.

    Raises:
        RuleError: no node, no card, or no memory on a card.
    """
    if cluster.nodes < 1 or cluster.gpus_per_node < 1:
        raise RuleError(
            rule="a cluster has at least one node and one GPU per node",
            value=(cluster.nodes, cluster.gpus_per_node),
            remedy="Give nodes >= 1 and gpus_per_node >= 1.",
        )


def _check_pins(model: ModelSpec, world: int, fixed: Mapping[str, Any]) -> None:
    limits = {
        "sequence_degree": ("attention heads", model.attention.heads),
        "expert_degree": ("experts", model.experts),
        "vocab_degree": (None, 0),
    }
    for key, (noun, count) in limits.items():
        if key not in fixed:
            continue
        degree = fixed[key]
        if not isinstance(degree, int) or degree < 1 or world % degree:
            raise RuleError(
                rule=f"{key} must divide the {world} ranks",
                value=degree,
                remedy=f"Use one of {divisors(world)}.",
            )
        if noun is not None and count % degree:
            allowed = [d for d in divisors(world) if count % d == 0]
            raise RuleError(
                rule=f"{key} must divide the model's {count} {noun}",
                value=degree,
                remedy=f"Use one of {allowed}.",
            )


def sequence_degrees(model: ModelSpec, world: int) -> list[int]:
    """D: divides W and the attention heads (key-value heads are repeated where D exceeds them)."""
    return [d for d in divisors(world) if model.attention.heads % d == 0]


def expert_degrees(model: ModelSpec, world: int) -> list[int]:
    """E_p: divides W and the experts."""
    return [d for d in divisors(world) if model.experts % d == 0]


def vocab_degrees(model: ModelSpec, world: int) -> list[int]:
    """P: divides W; a vocabulary it does not divide is cut into shards that differ by one entry at most."""
    return [d for d in divisors(world) if d <= model.vocab]


def batches(
    model: ModelSpec, cluster: ClusterSpec, workload: Workload, fixed: Mapping[str, Any]
) -> Iterator[Batch]:
    """Every (D, N, accumulation) with N = s*context/D a whole number and N*W dividing the global batch.

    Where a batch has more than ``MAX_BATCHES`` such sizes for a degree, an even selection of them.
    """
    check_cluster(cluster)
    world = cluster.world_size
    _check_pins(model, world, fixed)
    context, total = workload.context_tokens, workload.global_batch_tokens
    sequences = total // context
    for degree in sequence_degrees(model, world):
        if fixed.get("sequence_degree", degree) != degree or context % degree:
            continue
        groups = world // degree
        # s sequences per group at a time: s * groups must divide the sequences of the whole batch.
        if sequences % groups:
            continue
        sizes = divisors(sequences // groups)
        if not fixed.keys() & {"max_tokens_per_rank", "accumulation_steps"}:
            sizes = spread(sizes)
        for per_group in sizes:
            tokens = per_group * context // degree
            steps = sequences // (groups * per_group)
            if fixed.get("max_tokens_per_rank", tokens) != tokens:
                continue
            if fixed.get("accumulation_steps", steps) != steps:
                continue
            yield Batch(degree, tokens, steps)


def no_layout_reason(model: ModelSpec, cluster: ClusterSpec, workload: Workload) -> str:
    """Why no (D, N, accumulation) is legal, with what would be."""
    world = cluster.world_size
    degrees = sequence_degrees(model, world)
    sequences = workload.global_batch_tokens // workload.context_tokens
    largest = max(degrees)
    if sequences < world // largest:
        need = world // largest * workload.context_tokens
        return (
            f"{world} ranks in groups of at most {largest} (a divisor of {model.attention.heads} heads) hold"
            f" {world // largest} sequences at once, but the batch has {sequences}: use a global batch of at least"
            f" {need} tokens or fewer GPUs"
        )
    return (
        f"no sequence degree among {degrees} divides both the context of {workload.context_tokens} tokens and gives"
        f" a whole number of micro-batches out of {sequences} sequences on {world} ranks: use a context and a batch"
        f" divisible by {world}"
    )
