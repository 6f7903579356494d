"""The layer without any dispatch, in float64: what every operator must equal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from operators.expert_mlp import ExpertWeights
from operators.kernels.swiglu import Gate
from operators.routing import Routing


@dataclass
class Layer:
    """Inputs of all ranks; drawn from a seed, equal in every process."""

    hidden: list[Tensor]
    scores: list[Tensor]
    grads: list[Tensor]
    routings: list[Routing]
    weights: list[Tensor | None]
    """Of all experts: gate_up, down and their biases."""

    def local(self, rank: int, ranks: int) -> ExpertWeights:
        """One rank's experts, as fresh leaves."""
        own = []
        for w in self.weights:
            n = 0 if w is None else w.shape[0] // ranks
            own.append(None if w is None else w[rank * n : (rank + 1) * n].clone().requires_grad_())
        return ExpertWeights(*own)  # type: ignore[arg-type]


def draw(
    routings: list[Routing], hidden: int, intermediate: int, *, bias: bool, dtype: torch.dtype, seed: int = 0
) -> Layer:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

    experts = routings[0].experts
    return Layer(
        hidden=[normal(r.tokens, hidden) for r in routings],
        scores=[normal(r.tokens, experts).sigmoid() for r in routings],
        grads=[normal(r.tokens, hidden) for r in routings],
        routings=routings,
        weights=[
            normal(experts, 2 * intermediate, hidden, scale=hidden**-0.5),
            normal(experts, hidden, intermediate, scale=intermediate**-0.5),
            normal(experts, 2 * intermediate) if bias else None,
            normal(experts, hidden) if bias else None,
        ],
    )


@dataclass
class Answer:
    outputs: list[Tensor]
    d_hidden: list[Tensor]
    d_scores: list[Tensor]
    d_weights: list[Tensor | None]


def dense(layer: Layer, gate: Gate, *, normalize: bool = False) -> Answer:
    """Every expert on every token, masked; plain autograd in float64."""
    weights = [None if w is None else w.double().clone().requires_grad_() for w in layer.weights]
    hidden = [h.double().clone().requires_grad_() for h in layer.hidden]
    scores = [s.double().clone().requires_grad_() for s in layer.scores]
    up, down, up_bias, down_bias = weights
    assert up is not None
    assert down is not None
    outputs = []
    for x, s, routing in zip(hidden, scores, layer.routings, strict=True):
        picked = s.gather(1, routing.ids_NK)
        if normalize:
            picked = picked / picked.sum(1, keepdim=True)
        mix = torch.zeros_like(s).scatter_add(1, routing.ids_NK, picked)
        values = torch.einsum("nh,egh->eng", x, up)
        if up_bias is not None:
            values = values + up_bias[:, None]
        half = values.shape[2] // 2
        g, u = (
            (values[..., 0::2], values[..., 1::2])
            if gate.interleaved
            else (values[..., :half], values[..., half:])
        )
        if gate.limit is None:
            h = torch.nn.functional.silu(g) * u
        else:
            g, u = g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit)
            h = (u + 1) * g * torch.sigmoid(gate.alpha * g)
        y = torch.einsum("eni,ehi->enh", h, down)
        if down_bias is not None:
            y = y + down_bias[:, None]
        outputs.append(torch.einsum("ne,enh->nh", mix, y))
    total = sum(
        ((o * g.double()).sum() for o, g in zip(outputs, layer.grads, strict=True)), start=torch.zeros(())
    )
    total.backward()
    return Answer(
        [o.detach() for o in outputs],
        [_grad(h) for h in hidden],
        [_grad(s) for s in scores],
        [None if w is None else _grad(w) for w in weights],
    )


def _grad(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad
