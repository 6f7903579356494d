"""The paper's way through backward: one checkpoint per chunk, kept to compare with.

Dispatch, migration and return are differentiable steps of their own, and the experts of every chunk run inside
a non-reentrant checkpoint. Autograd holds every chunk's received rows until backward reaches it: a copy of all
routes, whatever the chunk count. Inside a layer checkpoint the experts are evaluated three times per update.
The dispatch is serial.

Shape suffixes: N tokens, H hidden width, R rows received in a chunk, C tokens of a chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from operators import dispatch_chunks as chunks
from operators.dispatch_plan import DispatchPlan
from operators.expert_mlp import ExpertWeights, fetch_weight, return_home
from operators.first_order import first_order
from operators.kernels.route import accumulation_dtype
from operators.kernels.swiglu import Gate
from operators.ranks import Ranks

if TYPE_CHECKING:
    from operators.pipelined_llep import LayerCall


class _ToExperts(torch.autograd.Function):
    """``[N, H] -> [R, H]`` of one chunk, in slot order; backward brings the rows' gradients home."""

    @staticmethod
    def forward(ctx: Any, rows_NH: Tensor, plan: DispatchPlan, ranks: Ranks, chunk: int) -> Tensor:
        ctx.args = (plan, ranks, chunk, rows_NH.shape)
        return chunks.take_sorted(plan, chunk, chunks.dispatch(plan, ranks, chunk, rows_NH))

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan, ranks, chunk, shape = ctx.args
        back = chunks.send_back(plan, ranks, chunk, chunks.arrival_order(plan, chunk, grads[0].contiguous()))
        out_NH = grads[0].new_zeros(shape)
        chunks.combine(plan, chunk, back, None, out_NH)
        return out_NH, None, None, None


class _ToTokens(torch.autograd.Function):
    """Weighted ``[R, H]`` of one chunk -> its tokens' sums ``[C, H]``; backward sends the gradient out."""

    @staticmethod
    def forward(ctx: Any, rows_RH: Tensor, plan: DispatchPlan, ranks: Ranks, chunk: int) -> Tensor:
        ctx.args = (plan, ranks, chunk)
        back = chunks.send_back(plan, ranks, chunk, chunks.arrival_order(plan, chunk, rows_RH))
        out_NH = rows_RH.new_empty(plan.tokens, rows_RH.shape[1])
        chunks.combine(plan, chunk, back, None, out_NH)
        return out_NH[plan.chunk_tokens(chunk)].contiguous()

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan, ranks, chunk = ctx.args
        grad_NH = grads[0].new_empty(plan.tokens, grads[0].shape[1])
        grad_NH[plan.chunk_tokens(chunk)] = grads[0]
        rows = chunks.take_sorted(plan, chunk, chunks.dispatch(plan, ranks, chunk, grad_NH))
        return rows, None, None, None


class _Enter(torch.autograd.Function):
    """Router weights to the experts and guests' weights to their hosts, in one node.

    One node, because a rank without rows or guests must enter the exchanges of backward like all others, in
    the same order.
    """

    @staticmethod
    def forward(
        ctx: Any, plan: DispatchPlan, ranks: Ranks, values_NK: Tensor, *own: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.args = (plan, ranks, [None if w is None else w.shape for w in own])
        guests = [None if w is None or plan.migration is None else fetch_weight(plan, ranks, w) for w in own]
        return (chunks.scalars_to_experts(plan, ranks, values_NK), *guests)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        plan, ranks, shapes = ctx.args
        assert grads[0] is not None
        home: list[Tensor | None] = []
        for shape, guest in zip(shapes, grads[1:], strict=True):
            if shape is None or guest is None or plan.migration is None:
                home.append(None)
                continue
            own = guest.new_zeros(shape)
            return_home(plan, ranks, own, guest.contiguous())
            home.append(own)
        return (None, None, chunks.scalars_to_tokens(plan, ranks, grads[0].contiguous()), *home)


def nested_layer(hidden_NH: Tensor, weights_NK: Tensor, own: ExpertWeights, call: LayerCall) -> Tensor:
    """One layer with a checkpoint per chunk, by plain autograd."""
    plan, ranks = call.plan, call.ranks
    wide_NK = weights_NK.to(accumulation_dtype(weights_NK.dtype))
    row_weights, *guest = _Enter.apply(plan, ranks, wide_NK, *own)  # type: ignore[no-untyped-call]
    parts = []
    for i in range(plan.chunks):
        x_RH = _ToExperts.apply(hidden_NH.contiguous(), plan, ranks, i)  # type: ignore[no-untyped-call]
        y_RH = checkpoint(
            _experts_as_given,
            call.gate,
            plan,
            i,
            x_RH,
            row_weights[plan.receive_range(i)],
            *own,
            *guest,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        del x_RH
        parts.append(_ToTokens.apply(y_RH, plan, ranks, i))  # type: ignore[no-untyped-call]
        del y_RH
    by_chunk = torch.cat(parts)
    # Chunk i holds tokens i, i + K, …: where token n lies among the chunks' rows.
    numbers = torch.arange(plan.tokens, device=hidden_NH.device)
    order = torch.cat([numbers[plan.chunk_tokens(i)] for i in range(plan.chunks)])
    return by_chunk[torch.empty_like(order).scatter_(0, order, numbers)]


def _experts_as_given(
    gate: Gate, plan: DispatchPlan, chunk: int, x_RH: Tensor, *rest: Tensor | None
) -> Tensor:
    """:func:`_experts` in the inputs' dtype, whatever autocast says."""
    with torch.autocast(x_RH.device.type, enabled=False):
        return _experts(gate, plan, chunk, x_RH, *rest)  # type: ignore[arg-type]


def _experts(
    gate: Gate, plan: DispatchPlan, chunk: int, x_RH: Tensor, weights_R: Tensor, *weights: Tensor | None
) -> Tensor:
    """Weighted expert outputs of one chunk, differentiable; what the checkpoint runs twice."""
    own, guest = weights[:4], weights[4:]
    out, start = [], 0
    for slot, rows in enumerate(plan.slot_rows[chunk]):
        local = slot < plan.local_experts
        up, down, up_bias, down_bias = (
            None if w is None else w[slot if local else slot - plan.local_experts]
            for w in (own if local else guest)
        )
        assert up is not None
        assert down is not None
        values = torch.nn.functional.linear(x_RH[start : start + rows], up, up_bias)
        g, u = gate.split(values)
        if gate.limit is not None:
            g, u = g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit) + 1
        h = g * torch.sigmoid(g * gate.alpha) * u
        y = torch.nn.functional.linear(h, down, down_bias)
        out.append((y * weights_R[start : start + rows, None]).to(x_RH.dtype))
        start += rows
    return torch.cat(out)
