"""The ``gather`` mode of Ring-DTP: weights gathered once, three GEMMs instead of four.

Shapes: N own tokens, V the whole vocabulary, V_r this rank's shard, H hidden width.

With the whole head at hand a tile's softmax is final as soon as its logits are, so gradients come out of the
forward and logits are not evaluated twice. The price is memory that grows with V: the gathered weights and an
fp32 gradient of all of them. Both travel as rings, in shard order, with no temporary larger than a shard.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from operators.kernels.strip import strip_gradient_, strip_statistics
from operators.ranks import Ranks
from operators.ring_dtp_tiles import Strip, TileBuffer, accumulator_dtype, add_product_, write_product_
from operators.strip_fold import STATISTICS, fold
from operators.vocab_shards import VocabShards


def gather_weights(ranks: Ranks, shard_VH: Tensor, shards: VocabShards) -> Tensor:
    """All shards, in order: ``[V, H]``. Each hop lands in its place; one rank gets its own tensor back."""
    if ranks.size == 1:
        return shard_VH
    whole_VH = shard_VH.new_empty(shards.vocab, shard_VH.shape[1])
    parts = torch.split(whole_VH, list(shards.rows))
    parts[ranks.rank].copy_(shard_VH)
    for turn in range(ranks.size - 1):
        have, get = (ranks.rank - turn) % ranks.size, (ranks.rank - turn - 1) % ranks.size
        ranks.shift(parts[have], parts[get]).wait()
    return whole_VH


def reduce_to_shards(ranks: Ranks, whole_VH: Tensor, shards: VocabShards) -> Tensor:
    """Sum ``[V, H]`` over the ranks; each keeps its own shard ``[V_r, H]``, a view into its (spent) input.

    The sum of shard r starts on rank r + 1 and ends on rank r, in that order on every run.
    """
    parts = torch.split(whole_VH, list(shards.rows))
    if ranks.size > 1:
        arrived = whole_VH.new_empty(max(shards.rows), whole_VH.shape[1])
    for turn in range(ranks.size - 1):
        give, get = (ranks.rank - 1 - turn) % ranks.size, (ranks.rank - 2 - turn) % ranks.size
        part = arrived[: shards.rows[get]]
        ranks.shift(parts[give], part).wait()
        parts[get].add_(part)
    return parts[ranks.rank]


def gather_bias(ranks: Ranks, bias_V: Tensor | None, shards: VocabShards) -> Tensor | None:
    """All shards' biases, in order: ``[V]``."""
    if bias_V is None or ranks.size == 1:
        return bias_V
    padded = bias_V.new_zeros(max(shards.rows))
    padded[: bias_V.shape[0]] = bias_V
    rows_PV = ranks.all_gather(padded)
    return torch.cat([rows_PV[rank, :rows] for rank, rows in enumerate(shards.rows)])


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which gradients somebody asks for."""

    hidden: bool
    weight: bool
    bias: bool


@dataclass(slots=True)
class GatherGradients:
    """Gradients of one pass, in the inputs' dtypes, and what the loss is made of (fp32 or fp64)."""

    log_sum_exp: Tensor
    target_logit: Tensor
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def gather_pass(
    ranks: Ranks,
    own: Strip,
    shards: VocabShards,
    *,
    strip_rows: int,
    upstream_N: Tensor,
    wanted: Wanted,
) -> GatherGradients:
    """Loss parts and gradients in one walk over the tiles (three GEMMs a tile).

    Args:
        own: this rank's tokens with its own weight and bias shards.
        upstream_N: gradient of the loss by each token's −log p, 0 for ignored ones.
    """
    hidden_NH, targets_N = own.hidden, own.targets
    exact = accumulator_dtype(hidden_NH.dtype)
    weight_VH, bias_V = gather_weights(ranks, own.weight, shards), gather_bias(ranks, own.bias, shards)
    statistics_N3 = torch.zeros(hidden_NH.shape[0], STATISTICS, dtype=exact, device=hidden_NH.device)
    d_hidden_NH = torch.empty_like(hidden_NH) if wanted.hidden else None
    d_weight_VH = torch.empty_like(weight_VH, dtype=exact) if wanted.weight else None
    d_bias_V = torch.zeros(shards.vocab, dtype=exact, device=hidden_NH.device) if wanted.bias else None
    buffer = TileBuffer(strip_rows, shards.vocab, hidden_NH)
    whole = Strip(hidden_NH, weight_VH, bias_V, targets_N, 0)
    fresh = True
    for rows, tile in buffer.tiles(hidden_NH.shape[0], shards.vocab):
        whole.logits(rows, tile)
        strip_statistics(tile, bias_V, targets_N[rows], 0, statistics_N3[rows])
        if not (wanted.hidden or wanted.weight or wanted.bias):
            continue
        log_sum_exp_n, _ = fold(statistics_N3[rows].unsqueeze(0))
        strip_gradient_(
            tile, bias_V, targets_N[rows], 0, log_sum_exp_n=log_sum_exp_n, upstream_n=upstream_N[rows]
        )
        if d_weight_VH is not None:
            (write_product_ if fresh else add_product_)(d_weight_VH, tile.t(), hidden_NH[rows])
        if d_hidden_NH is not None:
            torch.mm(tile, weight_VH, out=d_hidden_NH[rows])
        if d_bias_V is not None:
            d_bias_V.add_(tile.sum(dim=0, dtype=exact))
        fresh = False
        del tile
    if fresh and d_weight_VH is not None:
        d_weight_VH.zero_()
    if fresh and d_hidden_NH is not None:
        d_hidden_NH.zero_()
    del buffer, whole, weight_VH
    d_shard_VH = None
    if d_weight_VH is not None:
        d_shard_VH = reduce_to_shards(ranks, d_weight_VH, shards).to(own.weight.dtype, copy=ranks.size > 1)
    if d_bias_V is not None:
        ranks.all_reduce(d_bias_V)
        start = shards.starts[ranks.rank]
        d_bias_V = d_bias_V[start : start + shards.rows[ranks.rank]].clone()
        if own.bias is not None:
            d_bias_V = d_bias_V.to(own.bias.dtype)
    log_sum_exp_N, target_logit_N = fold(statistics_N3.unsqueeze(0))
    return GatherGradients(log_sum_exp_N, target_logit_N, d_hidden_NH, d_shard_VH, d_bias_V)
