"""What PipelinedLLEP is compared with, in its interface.

``standard_ep``: every row on its native rank, all at once, activations kept. ``llep``: the least-loaded plan,
all at once, activations kept, or recomputed by a layer checkpoint. Both use the same row kernels and matmuls as
PipelinedLLEP, so differences are those of the schedule; with one chunk PipelinedLLEP equals ``llep`` bit for
bit. The chunk policies are ways to choose K.

Shape suffixes: N tokens, H hidden width, E experts, K experts a token picks, R rows received, G = 2I.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from operators import dispatch_chunks as chunks
from operators.dispatch_launch import DispatchLaunch
from operators.dispatch_plan import DispatchPlan, make_plan
from operators.expert_mlp import ExpertMath, ExpertWeights, GradientAccumulators, fetch_guests
from operators.first_order import first_order
from operators.kernels.route import accumulation_dtype
from operators.kernels.swiglu import SWIGLU, Gate, gated, gated_backward_
from operators.pipelined_llep import LayerCall
from operators.ranks import Ranks
from operators.routing import Routing


def at_once_launch(launch: DispatchLaunch, tokens_max: int, *, migrate: bool) -> DispatchLaunch:
    """The launch of a baseline: one chunk, the same balancing knobs."""
    return replace(
        launch, chunk_tokens=max(1, tokens_max), max_chunks=1, dispatch_schedule="serial", migrate=migrate
    )


def llep(
    hidden_NH: Tensor,
    scores_NE: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    *,
    ranks: Ranks,
    launch: DispatchLaunch,
    gate: Gate = SWIGLU,
    normalize: bool = False,
    plan: DispatchPlan | None = None,
    recompute: bool = False,
) -> Tensor:
    """LLEP with all rows at once; arguments as :func:`operators.pipelined_llep.pipelined_llep`.

    Args:
        recompute: Keep only the layer input and run forward again in backward, as a layer checkpoint does.
    """
    plan = plan or make_plan(routing, ranks, at_once_launch(launch, max(1, routing.tokens), migrate=True))
    return _at_once(
        hidden_NH,
        scores_NE,
        routing,
        weights,
        LayerCall(plan, ranks, gate, launch),
        normalize=normalize,
        recompute=recompute,
    )


def standard_ep(
    hidden_NH: Tensor,
    scores_NE: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    *,
    ranks: Ranks,
    launch: DispatchLaunch,
    gate: Gate = SWIGLU,
    normalize: bool = False,
    plan: DispatchPlan | None = None,
    recompute: bool = False,
) -> Tensor:
    """Expert parallelism without balancing; arguments as :func:`llep`."""
    plan = plan or make_plan(routing, ranks, at_once_launch(launch, max(1, routing.tokens), migrate=False))
    return _at_once(
        hidden_NH,
        scores_NE,
        routing,
        weights,
        LayerCall(plan, ranks, gate, launch),
        normalize=normalize,
        recompute=recompute,
    )


def _at_once(
    hidden_NH: Tensor,
    scores_NE: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    call: LayerCall,
    *,
    normalize: bool,
    recompute: bool,
) -> Tensor:
    weights_NK = routing.weights(scores_NE, normalize=normalize)
    args = (hidden_NH.contiguous(), weights_NK, *weights, call)
    if recompute:
        out: Tensor = checkpoint(_apply, *args, use_reentrant=False, preserve_rng_state=False)
        return out
    return _apply(*args)


def _apply(*args: Any) -> Tensor:
    out_NH: Tensor = _AtOnce.apply(*args)  # type: ignore[no-untyped-call]
    return out_NH


class _AtOnce(torch.autograd.Function):
    """One exchange there, one back; keeps the received rows and the first layer's output."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weights_NK: Tensor, *rest: Any) -> Tensor:
        *expert_weights, call = rest
        plan, ranks, own = call.plan, call.ranks, ExpertWeights(*expert_weights)
        guest = fetch_guests(plan, ranks, own)
        experts = ExpertMath(call.gate, plan, own, guest)
        x_RH = chunks.take_sorted(plan, 0, chunks.dispatch(plan, ranks, 0, hidden_NH))
        up_RG = experts.up(0, x_RH)
        y_RH = experts.down(0, gated(call.gate, up_RG))
        back = chunks.send_back(plan, ranks, 0, chunks.arrival_order(plan, 0, y_RH))
        del y_RH
        out_NH = torch.empty_like(hidden_NH)
        wide_NK = weights_NK.to(accumulation_dtype(weights_NK.dtype)).contiguous()
        chunks.combine(plan, 0, back, wide_NK, out_NH)
        ctx.call, ctx.wanted = call, ctx.needs_input_grad[2:6]
        ctx.save_for_backward(weights_NK, x_RH, up_RG, *own, *(guest or ()))
        return out_NH

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weights_NK, x_RH, up_RG, *saved = ctx.saved_tensors
        plan, ranks = ctx.call.plan, ctx.call.ranks
        own, guest = ExpertWeights(*saved[:4]), ExpertWeights(*saved[4:]) if saved[4:] else None
        experts = ExpertMath(ctx.call.gate, plan, own, guest)
        totals = GradientAccumulators(experts, ctx.wanted)
        row_weights = chunks.scalars_to_experts(
            plan, ranks, weights_NK.to(accumulation_dtype(weights_NK.dtype))
        )
        dy_RH = chunks.take_sorted(plan, 0, chunks.dispatch(plan, ranks, 0, grads[0].contiguous()))
        g_RI = experts.down_gradient(0, dy_RH)
        d_RG = up_RG.clone()  # the kernel works in place, and a retained graph may come back
        del up_RG
        dots_R = gated_backward_(ctx.call.gate, d_RG, g_RI, row_weights)
        experts.add_bias_dots_(0, dy_RH, dots_R)
        totals.add_down(0, dy_RH, g_RI, row_weights)
        del dy_RH, g_RI
        totals.add_up(0, d_RG, x_RH)
        del x_RH
        dx_RH = experts.up_gradient(0, d_RG)
        del d_RG
        back = chunks.send_back(plan, ranks, 0, chunks.arrival_order(plan, 0, dx_RH))
        del dx_RH
        d_hidden_NH = grads[0].new_empty(grads[0].shape)
        chunks.combine(plan, 0, back, None, d_hidden_NH)
        d_weights_NK = chunks.scalars_to_tokens(plan, ranks, dots_R).to(weights_NK.dtype)
        return (d_hidden_NH, d_weights_NK, *totals.finish(ranks, own.gate_up_EGH.dtype), None)


def fixed_chunks(tokens_max: int, chunks_wanted: int) -> int:
    """K whatever the token count, as far as there are tokens."""
    return max(1, min(chunks_wanted, tokens_max))


def bandwidth_optimal_chunks(
    tokens_max: int, *, alpha_s: float, transfer_s: float, compute_s: float, most: int = 64
) -> int:
    """K that a pipeline of equal stages would choose (PipeMoE, ScheMoE, FSMoE), memory left aside.

    Each chunk costs a start-up of ``alpha_s`` in either activity, and the shorter of transfer and compute
    hides behind the longer save for one chunk: T(K) = longer + K·alpha + shorter/K, least at
    K = sqrt(shorter/alpha).

    Args:
        tokens_max: Largest token count of the group; K never exceeds it.
        alpha_s: Start-up of one chunk, seconds.
        transfer_s: All exchanges of the layer at once, seconds.
        compute_s: All expert matmuls of the layer at once, seconds.
        most: Cap on K.
    """
    if alpha_s <= 0:
        return max(1, min(most, tokens_max))
    best = math.sqrt(max(0.0, min(transfer_s, compute_s)) / alpha_s)
    return max(1, min(round(best), most, tokens_max))
