"""Live sets, operator by operator: what each adds to every phase of a step, under Eq. 6's term names.

Each function depends on its own operator's knobs only, is pure and cached, and returns phase -> term -> bytes.
A planner therefore evaluates every knob once per operator and merges the results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType

from cost_model.bounds.checkpoint_offload import (
    boundary_bytes,
    checkpoint_offload_terms,
    offloaded_count,
)
from cost_model.bounds.pipelined_llep import pipelined_llep_terms
from cost_model.bounds.ring_dtp import ring_dtp_terms
from cost_model.bounds.stream_adamw import stream_adamw_terms
from cost_model.layout import rank_params
from cost_model.memory_attention import attention_bytes, dense_block_bytes
from cost_model.memory_types import ALLOCATOR_TERMS, PHASE_NAMES
from cost_model.model_spec import ModelSpec

Live = Mapping[str, Mapping[str, int]]
"""Phase to term to bytes; absent means zero."""

FP32 = 4
SENT_ROUTE_BYTES = 24
RECEIVED_ROUTE_BYTES = 12
PASSES = ("forward", "backward")


def phases_of(model: ModelSpec) -> tuple[str, ...]:
    """Phases a step of this model goes through."""
    if model.dense_layers:
        return PHASE_NAMES
    return tuple(name for name in PHASE_NAMES if not name.endswith("_dense"))


def _everywhere(model: ModelSpec, term: str, nbytes: int) -> dict[str, dict[str, int]]:
    return {phase: {term: nbytes} for phase in phases_of(model)}


@lru_cache(maxsize=65536)
def resident_live(
    *, model: ModelSpec, world: int, expert_degree: int, vocab_degree: int, engine: str, scalar_bytes: int
) -> Live:
    """Weights and gradients through every phase, and ZeRO-3's gathered dense weights.

    2*b bytes a parameter (4 at bf16), 12 more for every parameter the rank updates when the optimizer lives
    on the device. Gathered: this layer's and the next one's dense weights, backward this layer's whole
    gradient too; the head's and the embedding's shard V/P where it is itself cut over W/P ranks.
    """
    held = rank_params(model, world, expert_degree)
    nbytes = 2 * scalar_bytes * (held.dense + held.routed)
    if engine == "device":
        nbytes += 12 * held.optimizer
    live = _everywhere(model, "weights_grads", nbytes)
    if world == 1:
        return _freeze(live)
    layer = _largest_dense_layer(model) * scalar_bytes
    shard = -(-model.vocab // vocab_degree) * model.hidden * scalar_bytes if vocab_degree < world else 0
    gathered = {"forward": 2 * layer, "backward": 3 * layer}
    for phase, terms in live.items():
        if phase == "head":
            # The head's own shard and its gradient are inputs and outputs of Ring-DTP, counted there.
            terms["zero_gather"] = layer
        elif phase == "optimizer":
            terms["zero_gather"] = 0
        else:
            # The first segment's forward follows the embedding's look-up, its backward ends in it.
            with_embedding = layer + 2 * shard if phase == "backward_attention" else 0
            terms["zero_gather"] = max(gathered[phase.split("_")[0]], with_embedding)
    return _freeze(live)


def _largest_dense_layer(model: ModelSpec) -> int:
    mixing = max(model.attention_params if model.attention_layers else 0, model.mixer_params)
    sparse = model.router_params + model.shared_params
    dense = model.dense_mlp_params if model.dense_layers else 0
    return mixing + max(sparse, dense)


@lru_cache(maxsize=65536)
def attention_live(*, model: ModelSpec, tokens: int, sequence_degree: int, scalar_bytes: int) -> Live:
    """Attention segments, and the dense feed-forward segments of models that have them."""
    live: dict[str, dict[str, int]] = {}
    for direction in PASSES:
        live[f"{direction}_attention"] = {
            "attention": attention_bytes(
                model=model,
                tokens=tokens,
                sequence_degree=sequence_degree,
                scalar_bytes=scalar_bytes,
                direction=direction,
            )
        }
        if model.dense_layers:
            dense = dense_block_bytes(
                tokens=tokens,
                hidden=model.hidden,
                intermediate=model.dense_intermediate,
                scalar_bytes=scalar_bytes,
                direction=direction,
            )
            live[f"{direction}_dense"] = {"dispatch": dense}
    return _freeze(live)


@lru_cache(maxsize=65536)
def dispatch_live(
    *,
    model: ModelSpec,
    tokens: int,
    expert_degree: int,
    chunks: int,
    schedule: str,
    scalar_bytes: int,
    rows_per_chunk: int | None,
    received_rows: int,
    migrated_experts: int,
) -> Live:
    """MoE segments: the operator's bound, the router's scores (fp32) and the shared experts.

    Every layer's routing record waits for backward, so it counts in all phases: per route sent an id (8 bytes),
    a weight and three places (4 each), per route received three places.

    Args:
        rows_per_chunk: None for the guarantee (any router), else the expected rows a rank receives in a chunk.
        received_rows: rows a rank receives in a whole layer.
    """
    record = model.moe_layers * (
        SENT_ROUTE_BYTES * tokens * model.top_k + RECEIVED_ROUTE_BYTES * received_rows
    )
    live = {phase: {"dispatch": record} for phase in phases_of(model) if phase != "optimizer"}
    for direction in PASSES:
        bound = pipelined_llep_terms(
            tokens=tokens,
            hidden=model.hidden,
            intermediate=model.expert_intermediate,
            experts=model.experts,
            top_k=model.top_k,
            expert_ranks=expert_degree,
            chunks=chunks,
            schedule=schedule,
            pass_=direction,
            scalar_bytes=scalar_bytes,
            rows_per_chunk=rows_per_chunk,
            migrated_experts=migrated_experts,
        )
        shared = dense_block_bytes(
            tokens=tokens,
            hidden=model.hidden,
            intermediate=model.shared_experts * model.shared_intermediate,
            scalar_bytes=scalar_bytes,
            direction=direction,
        )
        router = tokens * model.experts * FP32 * (1 if direction == "forward" else 2)
        live[f"{direction}_moe"] = {
            "dispatch": record
            + bound["dispatch_buffers"]
            + bound["intermediates"]
            + bound["inputs_outputs"]
            + shared
            + router,
            "migrated_experts": bound["migrated_experts"],
            "accumulators": bound["accumulators"],
        }
    return _freeze(live)


@lru_cache(maxsize=65536)
def head_live(
    *,
    model: ModelSpec,
    tokens: int,
    world: int,
    vocab_degree: int,
    ring_mode: str,
    strip_rows: int,
    scalar_bytes: int,
) -> Live:
    """The head's phase: the costlier pass of Ring-DTP.

    With P = W a rank's own vocabulary shard and its gradient are resident already, so they are not counted
    again among the operator's inputs and outputs; with P < W they are gathered for it.
    """
    shard = -(-model.vocab // vocab_degree) * model.hidden * scalar_bytes
    costliest: dict[str, int] = {}
    for direction in PASSES:
        bound = ring_dtp_terms(
            tokens=tokens,
            hidden=model.hidden,
            vocab=model.vocab,
            vocab_ranks=vocab_degree,
            ring_mode=ring_mode,
            strip_rows=strip_rows,
            pass_=direction,
            scalar_bytes=scalar_bytes,
        )
        strips = bound["strips"] + bound["movers"] + bound["inputs_outputs"]
        if vocab_degree == world:
            strips -= shard if direction == "forward" else 2 * shard
        terms = {"strips": strips, "accumulators": bound["accumulators"]}
        if sum(terms.values()) > sum(costliest.values()):
            costliest = terms
    return _freeze({"head": costliest})


@lru_cache(maxsize=65536)
def boundary_live(*, model: ModelSpec, tokens: int, host_budget_bytes: int, scalar_bytes: int) -> Live:
    """Checkpoint boundaries: those kept live until backward has passed, and the two on their way.

    Forward, an offloaded boundary lives on until its copy has left, so the two restored ones' room is
    counted there as well.
    """
    offloaded = offloaded_boundaries(
        model=model, tokens=tokens, host_budget_bytes=host_budget_bytes, scalar_bytes=scalar_bytes
    )
    terms = checkpoint_offload_terms(
        tokens=tokens,
        hidden=model.hidden,
        boundaries=model.boundaries,
        offloaded=offloaded,
        scalar_bytes=scalar_bytes,
    )
    return _freeze({phase: dict(terms) for phase in phases_of(model) if phase != "optimizer"})


@lru_cache(maxsize=65536)
def offloaded_boundaries(*, model: ModelSpec, tokens: int, host_budget_bytes: int, scalar_bytes: int) -> int:
    """|S|: boundaries that the host budget takes, in forward order, the last one never."""
    one = boundary_bytes(tokens=tokens, hidden=model.hidden, scalar_bytes=scalar_bytes)
    return offloaded_count(
        boundary_bytes=one, boundaries=model.boundaries, host_budget_bytes=host_budget_bytes
    )


@lru_cache(maxsize=65536)
def optimizer_live(
    *,
    model: ModelSpec,
    world: int,
    expert_degree: int,
    engine: str,
    bucket_params: int,
    staging_slots: int,
    host_share: float,
) -> Live:
    """Staging slots; they are set up once and kept, so they count in every phase."""
    terms = stream_adamw_terms(
        params=rank_params(model, world, expert_degree).optimizer,
        bucket_params=bucket_params,
        staging_slots=staging_slots,
        engine=engine,
        host_share=host_share,
    )
    return _freeze(_everywhere(model, "optimizer_staging", terms["optimizer_staging"]))


def merge(model: ModelSpec, parts: Iterable[Live]) -> dict[str, dict[str, int]]:
    """Sum of live sets, every phase with every allocator term."""
    merged = {phase: dict.fromkeys(ALLOCATOR_TERMS, 0) for phase in phases_of(model)}
    for part in parts:
        for phase, terms in part.items():
            target = merged[phase]
            for term, nbytes in terms.items():
                target[term] += nbytes
    return merged


def totals(live: Live) -> dict[str, int]:
    """Phase to its bytes."""
    return {phase: sum(terms.values()) for phase, terms in live.items()}


def _freeze(live: dict[str, dict[str, int]]) -> Live:
    # Cached results are shared, so nobody may change them.
    return MappingProxyType({phase: MappingProxyType(terms) for phase, terms in live.items()})
