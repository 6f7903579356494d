"""The two ring modes, forward and backward: who travels, who stays, where sums collect.

Shapes: N own tokens, N_q those of rank q, V_r this rank's shard, H hidden width, P ranks.

``activations``: hidden states travel past the resident weights; each rank leaves the strip's statistics for
their owners, one all-to-all of 12 bytes a token and shard brings them home. In backward the hidden gradient
travels with its states, the weight gradient stays.

``weights``: the shards travel past the resident tokens; in backward their gradient travels with them, the
hidden gradient stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from operators.ranks import Ranks
from operators.ring_dtp_gather import Wanted, gather_bias
from operators.ring_dtp_table import HeadTable
from operators.ring_dtp_tiles import (
    Strip,
    TileBuffer,
    accumulator_dtype,
    add_product_,
    backward_strip,
    forward_strip,
)
from operators.ring_dtp_travel import GradientHop, GradientRing, Round, rounds
from operators.strip_fold import STATISTICS, fold, neutral


@dataclass(frozen=True, slots=True)
class RingCall:
    """One call's fixed facts: the group, everybody's sizes, the knobs."""

    ranks: Ranks
    table: HeadTable
    strip_rows: int
    gradient_hop: GradientHop

    @property
    def first_id(self) -> int:
        """First vocabulary id of this rank's shard."""
        return self.table.shards.starts[self.ranks.rank]


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""By hidden states, weight shard and bias shard, in the inputs' dtypes."""


def forward_activations(call: RingCall, own: Strip) -> tuple[Tensor, Tensor]:
    """``(log_sum_exp_N, target_logit_N)`` of the own tokens; hidden states travel."""
    ranks, tokens = call.ranks, call.table.tokens
    targets_PN = _gather_rows(ranks, own.targets, max(tokens))
    statistics = _statistics(own.hidden, sum(tokens))
    by_owner = torch.split(statistics, list(tokens))
    buffer = _buffer(call, own.hidden, max(tokens), own.weight.shape[0])
    for owner, mover in rounds(ranks, own.hidden, tokens):
        strip = Strip(mover, own.weight, own.bias, targets_PN[owner, : tokens[owner]], call.first_id)
        forward_strip(strip, buffer, by_owner[owner])
        del strip
    del buffer
    here = tokens[ranks.rank]
    home = statistics.new_empty(ranks.size * here, STATISTICS)
    ranks.all_to_all(home, statistics, [here] * ranks.size, tokens).wait()
    return fold(home.view(ranks.size, here, STATISTICS))


def forward_weights(call: RingCall, own: Strip) -> tuple[Tensor, Tensor]:
    """``(log_sum_exp_N, target_logit_N)`` of the own tokens; weight shards travel."""
    ranks, shards, here = call.ranks, call.table.shards, own.hidden.shape[0]
    biases = _biases(call, own.bias)
    statistics = _statistics(own.hidden, ranks.size * here).view(ranks.size, here, STATISTICS)
    buffer = _buffer(call, own.hidden, here, max(shards.rows))
    for owner, mover in rounds(ranks, own.weight, shards.rows):
        strip = Strip(own.hidden, mover, biases[owner], own.targets, shards.starts[owner])
        forward_strip(strip, buffer, statistics[owner])
        del strip
    return fold(statistics)


def backward_activations(
    call: RingCall, own: Strip, *, log_sum_exp_N: Tensor, upstream_N: Tensor, wanted: Wanted
) -> Gradients:
    """Replay with travelling hidden states; ``upstream_N`` is 0 for ignored tokens."""
    ranks, tokens = call.ranks, call.table.tokens
    exact = accumulator_dtype(own.hidden.dtype)
    targets_PN = _gather_rows(ranks, own.targets, max(tokens))
    state_PN2 = _gather_rows(ranks, torch.stack((log_sum_exp_N, upstream_N), dim=1), max(tokens))
    log_sum_exp_PN, upstream_PN = state_PN2.unbind(dim=2)
    d_weight_VH = torch.zeros_like(own.weight, dtype=exact) if wanted.weight else None
    d_bias_V = torch.zeros_like(own.bias, dtype=exact) if own.bias is not None and wanted.bias else None
    buffer = _buffer(call, own.hidden, max(tokens), own.weight.shape[0])

    def replay(turn: Round) -> None:
        n = tokens[turn.owner]

        def use(rows: slice, gradient_nV: Tensor) -> None:
            if d_weight_VH is not None:
                add_product_(d_weight_VH, gradient_nV.t(), turn.mover[rows])
            if d_bias_V is not None:
                d_bias_V.add_(gradient_nV.sum(dim=0, dtype=exact))
            if wanted.hidden:  # last: its sum may still be on its way
                add_product_(turn.gradient()[rows], gradient_nV, own.weight)

        backward_strip(
            Strip(turn.mover, own.weight, own.bias, targets_PN[turn.owner, :n], call.first_id),
            buffer,
            log_sum_exp_N=log_sum_exp_PN[turn.owner, :n].contiguous(),
            upstream_N=upstream_PN[turn.owner, :n].contiguous(),
            use=use,
        )

    d_hidden_NH = None
    if wanted.hidden:
        ring = GradientRing(ranks, own.hidden, tokens, exact, hop=call.gradient_hop)
        for turn in ring:
            replay(turn)
        d_hidden_NH = ring.result
    else:
        for owner, mover in rounds(ranks, own.hidden, tokens):
            replay(Round(owner, mover, _no_gradient))
    buffer.free()
    return _cast(own, d_hidden_NH, d_weight_VH, d_bias_V)


def backward_weights(
    call: RingCall, own: Strip, *, log_sum_exp_N: Tensor, upstream_N: Tensor, wanted: Wanted
) -> Gradients:
    """Replay with travelling weight shards; ``upstream_N`` is 0 for ignored tokens."""
    ranks, shards, hidden_NH = call.ranks, call.table.shards, own.hidden
    exact = accumulator_dtype(hidden_NH.dtype)
    biases = _biases(call, own.bias)
    d_hidden_NH = torch.zeros_like(hidden_NH, dtype=exact) if wanted.hidden else None
    d_bias_V = None
    if wanted.bias:
        d_bias_V = torch.zeros(shards.vocab, dtype=exact, device=hidden_NH.device)
    buffer = _buffer(call, hidden_NH, hidden_NH.shape[0], max(shards.rows))

    def replay(turn: Round) -> None:
        start, count = shards.starts[turn.owner], shards.rows[turn.owner]

        def use(rows: slice, gradient_nV: Tensor) -> None:
            if d_hidden_NH is not None:
                add_product_(d_hidden_NH[rows], gradient_nV, turn.mover)
            if d_bias_V is not None:
                d_bias_V[start : start + count].add_(gradient_nV.sum(dim=0, dtype=exact))
            if wanted.weight:  # last: its sum may still be on its way
                add_product_(turn.gradient(), gradient_nV.t(), hidden_NH[rows])

        backward_strip(
            Strip(hidden_NH, turn.mover, biases[turn.owner], own.targets, start),
            buffer,
            log_sum_exp_N=log_sum_exp_N,
            upstream_N=upstream_N,
            use=use,
        )

    d_weight_VH = None
    if wanted.weight:
        ring = GradientRing(ranks, own.weight, shards.rows, exact, hop=call.gradient_hop)
        for turn in ring:
            replay(turn)
        d_weight_VH = ring.result
    else:
        for owner, mover in rounds(ranks, own.weight, shards.rows):
            replay(Round(owner, mover, _no_gradient))
    buffer.free()
    if d_bias_V is not None:
        ranks.all_reduce(d_bias_V)
        d_bias_V = d_bias_V[call.first_id : call.first_id + own.weight.shape[0]].clone()
    return _cast(own, d_hidden_NH, d_weight_VH, d_bias_V)


def _cast(own: Strip, hidden: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> Gradients:
    dtype = own.hidden.dtype
    return (
        None if hidden is None else hidden.to(dtype),
        None if weight is None else weight.to(dtype),
        None if bias is None or own.bias is None else bias.to(own.bias.dtype),
    )


def _no_gradient() -> Tensor:
    raise AssertionError("nobody asked for this gradient")


def _buffer(call: RingCall, like: Tensor, tokens: int, columns: int) -> TileBuffer:
    return TileBuffer(min(call.strip_rows, tokens), columns, like)


def _statistics(like: Tensor, rows: int) -> Tensor:
    """``[rows, 3]`` neutral statistics."""
    statistics = torch.empty(rows, STATISTICS, dtype=accumulator_dtype(like.dtype), device=like.device)
    neutral(statistics)
    return statistics


def _gather_rows(ranks: Ranks, x_N: Tensor, longest: int) -> Tensor:
    """Every rank's rows, padded to the longest: ``[P, longest, ...]``."""
    if x_N.shape[0] < longest:
        padded = x_N.new_zeros(longest, *x_N.shape[1:])
        padded[: x_N.shape[0]] = x_N
        x_N = padded
    return ranks.all_gather(x_N)


def _biases(call: RingCall, bias_V: Tensor | None) -> tuple[Tensor | None, ...]:
    """Every shard's bias, in rank order."""
    whole = gather_bias(call.ranks, bias_V, call.table.shards)
    if whole is None:
        return (None,) * call.ranks.size
    return torch.split(whole, list(call.table.shards.rows))
