"""Ring-DTP: the language-model head and its cross-entropy over a vocabulary shared by P ranks.

Shapes: N own tokens (any number on each rank, also 0), V_r rows of this rank's vocabulary shard (any number,
also 0), V = Σ V_r, H hidden width.

Every rank has tokens and targets of its own and one shard of the head. Nobody ever holds logits of all V for
all tokens: strips of N × V_r logits pass by, cut into tiles of ``strip_rows`` rows; what stays of a strip is
three numbers a token. The backward replays the strips.

| mode          | travels                                   | GEMMs | memory beside inputs and outputs         |
|---------------|-------------------------------------------|-------|------------------------------------------|
| `activations` | hidden states, in backward their gradient | 4     | a tile and 2-3 × max N · H               |
| `weights`     | weight shards, in backward their gradient | 4     | a tile and 2-3 × max V_r · H             |
| `gather`      | weights once, their gradient once         | 3     | a tile of all V, weights and gradient of all V |
| `auto`        | weights iff max N > max V_r               | 4     |                                          |
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, overload

import torch
from torch import Tensor

from operators.bounds.ring_dtp import default_strip_rows, resolve_ring_mode
from operators.errors import RuleError
from operators.first_order import first_order
from operators.kernels.strip import has_data
from operators.ranks import Ranks
from operators.ring_dtp_gather import GatherGradients, Wanted, gather_pass
from operators.ring_dtp_modes import (
    Gradients,
    RingCall,
    backward_activations,
    backward_weights,
    forward_activations,
    forward_weights,
)
from operators.ring_dtp_table import exchange_table
from operators.ring_dtp_tiles import Strip, accumulator_dtype
from operators.ring_dtp_travel import GradientHop

OPERATOR_VERSION = 1
"""Raised by hand when the schedule or the kernels change."""

RingMode = Literal["auto", "activations", "weights", "gather"]
Reduction = Literal["none", "mean", "sum"]
_MODES = ("auto", "activations", "weights", "gather")
_REDUCTIONS = ("none", "mean", "sum")
_HOPS = ("serial", "overlapped")


@overload
def ring_dtp(
    hidden_NH: Tensor,
    weight_shard_VH: Tensor,
    targets_N: Tensor,
    *,
    ranks: Ranks,
    mode: RingMode = ...,
    strip_rows: int | None = ...,
    bias: Tensor | None = ...,
    ignore_index: int = ...,
    reduction: Reduction = ...,
    token_count: int | None = ...,
    return_logprobs: Literal[False] = ...,
    gradient_hop: GradientHop = ...,
) -> Tensor: ...
@overload
def ring_dtp(
    hidden_NH: Tensor,
    weight_shard_VH: Tensor,
    targets_N: Tensor,
    *,
    ranks: Ranks,
    mode: RingMode = ...,
    strip_rows: int | None = ...,
    bias: Tensor | None = ...,
    ignore_index: int = ...,
    reduction: Reduction = ...,
    token_count: int | None = ...,
    return_logprobs: Literal[True],
    gradient_hop: GradientHop = ...,
) -> tuple[Tensor, Tensor]: ...
def ring_dtp(
    hidden_NH: Tensor,
    weight_shard_VH: Tensor,
    targets_N: Tensor,
    *,
    ranks: Ranks,
    mode: RingMode = "auto",
    strip_rows: int | None = None,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    token_count: int | None = None,
    return_logprobs: bool = False,
    gradient_hop: GradientHop = "serial",
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross-entropy of ``hidden @ weight.T + bias`` over a sharded vocabulary. A collective.

    Args:
        hidden_NH: ``[N, H]``, bf16, fp32 or fp64.
        weight_shard_VH: ``[V_r, H]``, the rows of this rank's vocabulary interval, same dtype. Shards in rank
            order make up the vocabulary (see :mod:`operators.vocab_shards`).
        targets_N: ``[N]`` int64 or int32 vocabulary ids, or ``ignore_index``.
        ranks: the vocabulary group.
        mode: what travels; see the module's table. The same on every rank.
        strip_rows: most rows of a tile of logits; default: about 400 MiB of logits (1.6 GiB in ``gather``).
        bias: ``[V_r]``, of the weights' dtype or fp32.
        ignore_index: targets of this value count for nothing.
        reduction: ``none`` gives ``[N]``; ``sum`` this rank's sum; ``mean`` this rank's sum over the count of
            targets of *all* ranks, so that the ranks' results add up to the mean of the group. (Each rank's
            ``backward`` then yields the gradient of that mean: nothing needs to be averaged again.)
        token_count: the count that ``mean`` divides by, if it is not this call's (accumulation, say).
        return_logprobs: also return the targets' log-probabilities ``[N]`` (0 where ignored), differentiable.
        gradient_hop: ``serial``, or ``overlapped`` with the next round's logits at one more buffer.

    Returns:
        The loss in fp32 (fp64 for fp64 inputs), alone or with the log-probabilities. If no target of any rank
        counts, the loss is 0 on every rank, connected to the graph, with gradients of zeros.

    The upstream gradient is applied in backward, token by token. Weight and hidden gradients are summed in
    fp32 whatever the dtype, and rounded once. Backward may run again (``retain_graph``); gradients of
    gradients are not offered. ``gather`` evaluates its gradients in forward when the reduction is ``mean`` or
    ``sum`` and ``return_logprobs`` is off (else in backward, from four GEMMs), which relies on all ranks
    passing the same upstream gradient: they compare notes in backward, and replay if it differs.

    Raises:
        RuleError: on every rank, when an input of any rank breaks a rule or the ranks disagree.
    """
    wrong = _wrong_option(mode, strip_rows, reduction, token_count, gradient_hop, ignore_index)
    options = -1  # the table carries it to the other ranks, who would wait for this one otherwise
    if wrong is None:
        options = _MODES.index(mode) * 12 + _REDUCTIONS.index(reduction) * 4
        options += _HOPS.index(gradient_hop) * 2 + return_logprobs
    try:
        table = exchange_table(
            ranks,
            hidden_NH,
            weight_shard_VH,
            bias,
            targets_N,
            ignore_index=ignore_index if wrong is None else -100,
            options=options,
            token_count=token_count if wrong is None else None,
        )
    finally:
        if wrong is not None:
            raise wrong
    widest = max(table.shards.rows)
    moving = "weights" if max(table.tokens) > widest else "activations"
    resolved = moving if mode == "auto" else mode
    columns = table.shards.vocab if resolved == "gather" else widest
    if strip_rows is None:
        strip_rows = default_strip_rows(columns, hidden_NH.element_size(), gathered=resolved == "gather")
    head = _Head(
        call=RingCall(ranks, table, strip_rows, gradient_hop), mode=resolved, ignore_index=ignore_index
    )
    divisor = max(1, table.counted if token_count is None else token_count) if reduction == "mean" else 1
    inputs = (hidden_NH.contiguous(), weight_shard_VH.contiguous(), bias, targets_N.contiguous().long())
    wants = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    if resolved == "gather" and wants and reduction != "none" and not return_logprobs:
        loss: Tensor = _GatheredLoss.apply(*inputs, head, 1.0 / divisor)  # type: ignore[no-untyped-call]
        return loss
    loss_N: Tensor = _TokenLoss.apply(*inputs, head)  # type: ignore[no-untyped-call]
    loss = loss_N if reduction == "none" else loss_N.sum() / divisor
    return (loss, -loss_N) if return_logprobs else loss


@dataclass(frozen=True, slots=True)
class _Head:
    call: RingCall
    mode: str
    ignore_index: int

    def counted(self, targets_N: Tensor) -> Tensor:
        return targets_N != self.ignore_index

    def token_loss(self, log_sum_exp_N: Tensor, target_logit_N: Tensor, targets_N: Tensor) -> Tensor:
        return torch.where(self.counted(targets_N), log_sum_exp_N - target_logit_N, 0.0)

    def gather(self, own: Strip, upstream_N: Tensor, wanted: Wanted) -> GatherGradients:
        call = self.call
        rows = min(call.strip_rows, own.hidden.shape[0])
        return gather_pass(
            call.ranks, own, call.table.shards, strip_rows=rows, upstream_N=upstream_N, wanted=wanted
        )


def _wanted(ctx: Any) -> Wanted:
    hidden, weight, bias = ctx.needs_input_grad[:3]
    return Wanted(hidden=hidden, weight=weight, bias=bias)


class _TokenLoss(torch.autograd.Function):
    """−log p of every own token; backward replays the strips with the tokens' upstream gradients."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_N: Tensor, head: _Head
    ) -> Tensor:
        own = Strip(hidden_NH, weight_VH, bias_V, targets_N, head.call.first_id)
        if head.mode == "activations":
            log_sum_exp_N, target_logit_N = forward_activations(head.call, own)
        elif head.mode == "weights":
            log_sum_exp_N, target_logit_N = forward_weights(head.call, own)
        else:
            nothing = Wanted(hidden=False, weight=False, bias=False)
            parts = head.gather(own, hidden_NH.new_empty(0), nothing)
            log_sum_exp_N, target_logit_N = parts.log_sum_exp, parts.target_logit
        ctx.head = head
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, log_sum_exp_N)
        return head.token_loss(log_sum_exp_N, target_logit_N, targets_N)

    @staticmethod
    @first_order
    def backward(ctx: Any, upstream_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, log_sum_exp_N = ctx.saved_tensors
        head: _Head = ctx.head
        own = Strip(hidden_NH, weight_VH, bias_V, targets_N, head.call.first_id)
        upstream_N = torch.where(head.counted(targets_N), upstream_N, 0.0)
        wanted = _wanted(ctx)
        gradients: Gradients
        if head.mode == "gather":
            pass_ = head.gather(own, upstream_N, wanted)
            gradients = (pass_.hidden, pass_.weight, pass_.bias)
        else:
            replay = backward_activations if head.mode == "activations" else backward_weights
            gradients = replay(
                head.call, own, log_sum_exp_N=log_sum_exp_N, upstream_N=upstream_N, wanted=wanted
            )
        return (*gradients, None, None)


class _GatheredLoss(torch.autograd.Function):
    """The scaled sum of −log p over the own tokens, with the gradients made on the way."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        head: _Head,
        scale: float,
    ) -> Tensor:
        own = Strip(hidden_NH, weight_VH, bias_V, targets_N, head.call.first_id)
        exact = accumulator_dtype(hidden_NH.dtype)
        upstream_N = head.counted(targets_N).to(exact) * scale
        parts = head.gather(own, upstream_N, _wanted(ctx))
        ctx.head = head
        ctx.save_for_backward(
            hidden_NH,
            weight_VH,
            bias_V,
            targets_N,
            upstream_N,
            parts.hidden,
            parts.weight,
            parts.bias,
        )
        return head.token_loss(parts.log_sum_exp, parts.target_logit, targets_N).sum() * scale

    @staticmethod
    @first_order
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, scaled_N, *made = ctx.saved_tensors
        head: _Head = ctx.head
        if not _same_everywhere(head.call.ranks, upstream):
            own = Strip(hidden_NH, weight_VH, bias_V, targets_N, head.call.first_id)
            again = head.gather(own, scaled_N * upstream, _wanted(ctx))
            return (again.hidden, again.weight, again.bias, None, None, None)
        scaled = [None if g is None else (g * upstream).to(g.dtype) for g in made]
        return (*scaled, None, None, None)


def _same_everywhere(ranks: Ranks, scalar: Tensor) -> bool:
    """Whether all ranks hold this value; the host waits for the answer."""
    if ranks.size == 1 or not has_data(scalar):
        return True
    values = ranks.all_gather(scalar.reshape(1)).flatten().tolist()
    return all(v == values[0] for v in values)


def _wrong_option(  # noqa: PLR0917
    mode: str,
    strip_rows: object,
    reduction: str,
    token_count: object,
    gradient_hop: str,
    ignore_index: object,
) -> RuleError | None:
    for name, value, allowed in (
        ("mode", mode, _MODES),
        ("reduction", reduction, _REDUCTIONS),
        ("gradient_hop", gradient_hop, _HOPS),
    ):
        if value not in allowed:
            return RuleError(
                rule=f"{name} is one of {', '.join(allowed)}",
                value=value,
                remedy=f"Pass one of them as {name}.",
            )
    for name, number, least in (("strip_rows", strip_rows, 1), ("token_count", token_count, 0)):
        if number is not None and (not isinstance(number, Integral) or int(number) < least):
            return RuleError(
                rule=f"{name} is a whole number, at least {least}",
                value=number,
                remedy=f"Leave {name} out for its default.",
            )
    if not isinstance(ignore_index, Integral):
        return RuleError(
            rule="ignore_index is a whole number",
            value=ignore_index,
            remedy="Pass a number that is no vocabulary id, -100 for example.",
        )
    return None


__all__ = ["OPERATOR_VERSION", "GradientHop", "Reduction", "RingMode", "resolve_ring_mode", "ring_dtp"]
