"""Time of the output head: a ring of P rounds over strips of logits, cut into tiles of rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from cost_model.latency import (
    GroupLinks,
    Number,
    dense_seconds,
    gather_seconds,
    overlapped_seconds,
    ring_hop_seconds,
)
from cost_model.rates import RateView

_FOLD_BYTES = 4
"""Strips are folded in fp32."""
_SCALING_PASSES = 12.0
"""Of the gathered head's backward over its gradients: the product itself is 2, two H200 took 3 ms a GB."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The head as a rank sees it (theory: N, H, V, P, b)."""

    tokens: int
    hidden: int
    vocab: int
    vocab_ranks: int
    scalar_bytes: int = 2

    @property
    def shard(self) -> int:
        """Vocabulary entries of the largest shard."""
        return -(-self.vocab // self.vocab_ranks)


def resolve_mover(tokens: int, vocab: int, vocab_ranks: int) -> Literal["activations", "weights"]:
    """Move the weights iff N > V/P: whichever block is smaller travels."""
    return "weights" if tokens > vocab / vocab_ranks else "activations"


def round_compute_seconds(rates: RateView, shape: HeadShape, strip_rows: Number, backward: bool) -> Number:
    """One strip: one matmul and the fold forward; three matmuls and the softmax backward; launches per tile.

    In backward every tile reads and writes the fp32 sum of the weight gradient: few rows cost a pass each.
    """
    strip = float(shape.tokens) * shape.shard
    matmuls = 3.0 if backward else 1.0
    passes = rates["strip_passes"] * (1.5 if backward else 1.0)
    tiles = np.ceil(shape.tokens / np.asarray(strip_rows, dtype=np.float64))
    sums = 2.0 * _FOLD_BYTES * shape.hidden * (tiles * shape.shard + shape.tokens) if backward else 0.0
    return (
        dense_seconds(rates, matmuls * 2.0 * strip * shape.hidden)
        + (passes * strip * _FOLD_BYTES + sums) / rates["hbm_bytes_per_s"]
        + matmuls * tiles * rates["tile_s"]
    )


def _gather_seconds(
    rates: RateView, shape: HeadShape, links: GroupLinks, strip_rows: Number, backward: bool
) -> Number:
    elements = float(shape.vocab) * shape.hidden
    if backward:
        kept = float(shape.shard + shape.tokens) * shape.hidden * shape.scalar_bytes
        scaling = _SCALING_PASSES * kept / rates["hbm_bytes_per_s"]
        return rates["head_sync_s"] + scaling + 0.0 * np.asarray(strip_rows, dtype=np.float64)
    travels = gather_seconds(rates, links, elements * shape.scalar_bytes)
    returns = gather_seconds(rates, links, elements * _FOLD_BYTES)
    # a tile is as wide as the vocabulary, and its softmax is final at once
    whole = replace(shape, vocab_ranks=1)
    compute = round_compute_seconds(rates, whole, strip_rows, backward=True)
    return rates["head_sync_s"] + travels + compute + returns


def head_seconds(
    rates: RateView,
    shape: HeadShape,
    links: GroupLinks,
    *,
    ring_mode: str,
    strip_rows: Number,
    backward: bool,
) -> Number:
    """Forward or backward of the whole head.

    ``head_sync_s`` is the exchange of sizes that a pass begins with. Then P rounds of a strip's compute against a hop,
    overlapped by eta. Weights need P-1 hops; activations one more, to bring the state home. In backward the mover's
    fp32 gradient travels after the strip (serial hop).
    ``gather`` collects the whole weight, evaluates loss and gradients tile by tile (three matmuls, all in forward)
    and sums the fp32 gradient back into shards; its backward only scales what is there.
    """
    if ring_mode == "gather":
        return _gather_seconds(rates, shape, links, strip_rows, backward)
    compute = round_compute_seconds(rates, shape, strip_rows, backward)
    rounds = shape.vocab_ranks
    if ring_mode == "auto":
        ring_mode = resolve_mover(shape.tokens, shape.vocab, shape.vocab_ranks)
    block = shape.shard if ring_mode == "weights" else shape.tokens
    moved = float(block) * shape.hidden
    hop = ring_hop_seconds(rates, links, moved * shape.scalar_bytes)
    hops = rounds - 1 if ring_mode == "weights" else rounds
    gradient = ring_hop_seconds(rates, links, moved * _FOLD_BYTES) if backward else 0.0
    start = rates["head_sync_s"]
    if rounds == 1:
        return start + compute
    ring = hops * overlapped_seconds(compute, hop, rates["overlap"]) + (rounds - hops) * compute
    return start + ring + rounds * gradient
