"""PipelinedLLEP: expert dispatch one chunk at a time, exact, with bounded memory.

The layer's tokens are cut into K strided chunks (Eq. 1). Forward sends a chunk's rows to their experts,
computes, sends the results home and sums them; backward sends the chunk's rows and output gradients again,
recomputes the first expert layer and differentiates, so at no time does more than a few chunks' rows live.
Between the passes only the layer input, the routing weights and the plan are kept: do not checkpoint this
segment again, its forward would run twice.

Per update and row the experts make eleven matmuls: three forward, two recomputed, six backward. The second
layer's output is not recomputed: a router weight's gradient is ``<dY, h W₂ᵀ> = <dY W₂, h>``, and ``dY W₂`` is
needed anyway.

Shape suffixes: N tokens of this rank, H hidden width, E experts (local ones in weights), K experts a token
picks, I intermediate width, G = 2I, R rows received in a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from operators import dispatch_chunks as chunks
from operators.dispatch_agreement import refuse, state
from operators.dispatch_launch import DispatchLaunch
from operators.dispatch_plan import DispatchPlan, check_same_call, make_plan
from operators.errors import RuleError
from operators.expert_mlp import ExpertMath, ExpertWeights, GradientAccumulators, fetch_guests
from operators.first_order import first_order
from operators.kernels.route import accumulation_dtype
from operators.kernels.swiglu import SWIGLU, Gate, gated, gated_backward_
from operators.ranks import Ranks
from operators.routing import Routing

OPERATOR_VERSION = 3
"""Raised by hand when the schedule or a kernel changes what a measurement would show."""


@dataclass(frozen=True)
class LayerCall:
    """Everything of a call that is not a tensor to differentiate."""

    plan: DispatchPlan
    ranks: Ranks
    gate: Gate
    launch: DispatchLaunch


def pipelined_llep(
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
) -> Tensor:
    """One Mixture-of-Experts layer over the group. A collective in forward and in backward.

    Args:
        hidden_NH: This rank's tokens; N may be 0 and may differ between ranks.
        scores_NE: Full router scores; the weights are gathered from them at the saved ids, and their
            gradient flows back into them.
        routing: Which experts each token picked (the record that recompute replays).
        weights: This rank's experts ``[rank·E/P, (rank+1)·E/P)``. Frozen ones (``requires_grad`` False, on all
            ranks alike) cost no accumulator.
        ranks: The expert group.
        launch: Chunking, schedule and balancing; equal on all ranks.
        gate: Expert activation.
        normalize: Divide a token's weights by their sum.
        plan: A plan made earlier by :func:`operators.dispatch_plan.make_plan` from the same routing.

    Returns:
        ``[N, H]`` weighted sums of the experts' outputs, in the dtype of ``hidden_NH``.

    Raises:
        RuleError: on every rank: shapes or dtypes of any rank do not fit together, a picked expert does not exist,
            or the ranks disagree on launch, shapes, gate or wanted gradients. With ``plan`` there is no exchange: only
            this rank's own inputs are checked, and only here.
    """
    statement = state(hidden_NH, scores_NE, routing, weights, ranks=ranks, gate=gate)
    if plan is None:
        # Refuses unknown experts, too, which the next line would stumble over.
        plan = make_plan(routing, ranks, launch, statement)
    else:
        refuse(statement, ranks.rank)
        plan.check_routing(routing, ranks)
    weights_NK = routing.weights(scores_NE, normalize=normalize)
    call = LayerCall(plan, ranks, gate, launch)
    if launch.backward == "nested":
        from operators.pipelined_llep_nested import nested_layer

        return nested_layer(hidden_NH, weights_NK, weights, call)
    out_NH: Tensor = _Chunked.apply(hidden_NH, weights_NK, *weights, call)  # type: ignore[no-untyped-call]
    return out_NH


class PipelinedLLEP(nn.Module):
    """The experts of one layer, dispatched by :func:`pipelined_llep`; shared experts beside them.

    Args:
        hidden: H.
        intermediate: I.
        experts: E over the whole group; a multiple of ``ranks.size``.
        ranks: The expert group; this module holds the experts of ``ranks.rank``.
        launch: Launch knobs, equal on all ranks.
        gate: Expert activation (``SWIGLU`` or ``GPT_OSS`` of ``operators.kernels.swiglu``).
        bias: Whether both layers have biases (gpt-oss).
        normalize: Divide a token's router weights by their sum.
        shared: A module ``[N, H] -> [N, H]`` every token goes through, added to the routed sum.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        experts: int,
        *,
        ranks: Ranks,
        launch: DispatchLaunch,
        gate: Gate = SWIGLU,
        bias: bool = False,
        normalize: bool = False,
        shared: nn.Module | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if experts % ranks.size:
            raise RuleError(
                rule="the number of experts is a multiple of the ranks that share them",
                value=(experts, ranks.size),
                remedy="Choose expert_degree among the divisors of the expert count.",
            )
        local = experts // ranks.size
        kind: dict[str, Any] = {"dtype": dtype, "device": device}
        self.ranks, self.launch, self.gate, self.normalize = ranks, launch, gate, normalize
        self.gate_up = nn.Parameter(torch.empty(local, 2 * intermediate, hidden, **kind))
        self.down = nn.Parameter(torch.empty(local, hidden, intermediate, **kind))
        self.gate_up_bias = nn.Parameter(torch.zeros(local, 2 * intermediate, **kind)) if bias else None
        self.down_bias = nn.Parameter(torch.zeros(local, hidden, **kind)) if bias else None
        self.shared = shared
        for weight in (self.gate_up, self.down):
            nn.init.normal_(weight, std=1 / math.sqrt(weight.shape[2]))

    def forward(
        self, hidden_NH: Tensor, scores_NE: Tensor, routing: Routing, plan: DispatchPlan | None = None
    ) -> Tensor:
        """See :func:`pipelined_llep`."""
        out_NH = pipelined_llep(
            hidden_NH,
            scores_NE,
            routing,
            ExpertWeights(self.gate_up, self.down, self.gate_up_bias, self.down_bias),
            ranks=self.ranks,
            launch=self.launch,
            gate=self.gate,
            normalize=self.normalize,
            plan=plan,
        )
        return out_NH if self.shared is None else out_NH + self.shared(hidden_NH)


class _Chunked(torch.autograd.Function):
    """Forward and backward, chunk at a time."""

    saves_boundary = True  # the layer input may wait for backward on the host (operators.checkpoint_offload)

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weights_NK: Tensor, *rest: Any) -> Tensor:
        *expert_weights, call = rest
        hidden_NH = hidden_NH.contiguous()
        ctx.wanted = ctx.needs_input_grad[2:6]
        ctx.save_for_backward(hidden_NH, weights_NK, *expert_weights)
        ctx.call = call
        return forward_chunks(hidden_NH, weights_NK, ExpertWeights(*expert_weights), call)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weights_NK, *expert_weights = ctx.saved_tensors
        return (
            *backward_chunks(
                grads[0].contiguous(),
                hidden_NH,
                weights_NK,
                ExpertWeights(*expert_weights),
                ctx.call,
                wanted=ctx.wanted,
            ),
            None,
        )


def forward_chunks(hidden_NH: Tensor, weights_NK: Tensor, own: ExpertWeights, call: LayerCall) -> Tensor:
    """The forward pass by the schedule of the launch."""
    plan, ranks, schedule = call.plan, call.ranks, call.launch.dispatch_schedule
    experts = ExpertMath(call.gate, plan, own, fetch_guests(plan, ranks, own))
    wide_NK = weights_NK.to(accumulation_dtype(weights_NK.dtype)).contiguous()
    out_NH = torch.empty_like(hidden_NH)
    returning: tuple[int, chunks.Transfer] | None = None
    coming = chunks.dispatch(plan, ranks, 0, hidden_NH)
    for i in range(plan.chunks):
        last = i + 1 == plan.chunks
        x_RH = chunks.take_sorted(plan, i, coming)
        if schedule != "serial" and not last:
            coming = chunks.dispatch(plan, ranks, i + 1, hidden_NH)
        up_RG = experts.up(i, x_RH)
        del x_RH
        h_RI = gated(call.gate, up_RG)
        del up_RG
        y_RH = experts.down(i, h_RI)
        del h_RI
        if returning is not None:
            chunks.combine(plan, returning[0], returning[1], wide_NK, out_NH)
            returning = None
        arrival_RH = chunks.arrival_order(plan, i, y_RH)
        del y_RH
        back = chunks.send_back(plan, ranks, i, arrival_RH)
        del arrival_RH
        if schedule == "overlap" and not last:
            returning = (i, back)
        else:
            chunks.combine(plan, i, back, wide_NK, out_NH)
        del back
        if schedule == "serial" and not last:
            coming = chunks.dispatch(plan, ranks, i + 1, hidden_NH)
    return out_NH


def backward_chunks(
    grad_NH: Tensor,
    hidden_NH: Tensor,
    weights_NK: Tensor,
    own: ExpertWeights,
    call: LayerCall,
    *,
    wanted: Sequence[bool] = (True,) * 4,
) -> tuple[Tensor | None, ...]:
    """The backward pass: gradients of hidden, router weights and the wanted ones of the four expert weights."""
    plan, ranks, schedule = call.plan, call.ranks, call.launch.dispatch_schedule
    ahead = schedule != "serial" and plan.chunks > 1
    check_same_call(plan, ranks)
    experts = ExpertMath(call.gate, plan, own, fetch_guests(plan, ranks, own))
    totals = GradientAccumulators(experts, wanted)
    wide_NK = weights_NK.to(accumulation_dtype(weights_NK.dtype))
    row_weights = chunks.scalars_to_experts(plan, ranks, wide_NK)
    row_dots = torch.empty_like(row_weights)
    d_hidden_NH = torch.empty_like(hidden_NH)
    returning: tuple[int, chunks.Transfer] | None = None
    coming_dy = chunks.dispatch(plan, ranks, 0, grad_NH)
    coming_x = chunks.dispatch(plan, ranks, 0, hidden_NH) if ahead else None
    for i in range(plan.chunks):
        last = i + 1 == plan.chunks
        rows = plan.receive_range(i)
        dy_RH = chunks.take_sorted(plan, i, coming_dy)
        # The inputs come before the first product: dY stays until its weight gradient, so nothing is won by waiting.
        if coming_x is None:
            coming_x = chunks.dispatch(plan, ranks, i, hidden_NH)
        x_RH = chunks.take_sorted(plan, i, coming_x)
        coming_x = None
        if ahead and not last:
            coming_dy = chunks.dispatch(plan, ranks, i + 1, grad_NH)
        g_RI = experts.down_gradient(i, dy_RH)
        up_RG = experts.up(i, x_RH)
        dots_R = gated_backward_(call.gate, up_RG, g_RI, row_weights[rows])
        experts.add_bias_dots_(i, dy_RH, dots_R)
        row_dots[rows] = dots_R
        totals.add_down(i, dy_RH, g_RI, row_weights[rows])
        del dy_RH, g_RI, dots_R
        if returning is not None:
            chunks.combine(plan, returning[0], returning[1], None, d_hidden_NH)
            returning = None
        if ahead and not last:
            coming_dy.wait()
            coming_x = chunks.dispatch(plan, ranks, i + 1, hidden_NH)
        totals.add_up(i, up_RG, x_RH)
        del x_RH
        dx_RH = experts.up_gradient(i, up_RG)
        del up_RG
        if coming_x is not None:
            coming_x.wait()
        arrival_RH = chunks.arrival_order(plan, i, dx_RH)
        del dx_RH
        back = chunks.send_back(plan, ranks, i, arrival_RH)
        del arrival_RH
        if schedule == "overlap" and not last:
            returning = (i, back)
        else:
            chunks.combine(plan, i, back, None, d_hidden_NH)
        del back
        if not ahead and not last:
            coming_dy = chunks.dispatch(plan, ranks, i + 1, grad_NH)
    d_weights_NK = chunks.scalars_to_tokens(plan, ranks, row_dots).to(weights_NK.dtype)
    return (d_hidden_NH, d_weights_NK, *totals.finish(ranks, own.gate_up_EGH.dtype))
