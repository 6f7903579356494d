"""Cases of a sharded head for tests: inputs of every rank from one seed, and the dense answer.

Every rank builds all ranks' inputs from the seed, so the dense float64 reference needs no communication.
Shapes: N tokens of one rank, V vocabulary, H hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from operators.ranks import Ranks
from operators.ring_dtp import GradientHop, Reduction, RingMode, ring_dtp
from operators.vocab_shards import VocabShards

HIDDEN = 6


@dataclass(frozen=True)
class Case:
    """One call of the head by all ranks."""

    tokens: tuple[int, ...]
    vocab: int
    mode: RingMode = "activations"
    reduction: Reduction = "mean"
    strip_rows: int | None = None
    bias: bool = False
    gradient_hop: GradientHop = "serial"
    ignored: float = 0.2
    """Share of ignored targets."""
    ignored_ranks: tuple[int, ...] = ()
    target_range: tuple[int, int] | None = None
    ignore_index: int = -100
    token_count: int | None = None
    shard_rows: tuple[int, ...] | None = None
    upstream: tuple[float, ...] = ()
    """Upstream gradient of each rank's loss; default 1 everywhere. With ``none``: random per-token weights."""
    dtype: torch.dtype = torch.float64
    seed: int = 0

    @property
    def shards(self) -> VocabShards:
        if self.shard_rows is not None:
            return VocabShards.of(self.shard_rows)
        return VocabShards.even(self.vocab, len(self.tokens))


@dataclass
class Inputs:
    """All ranks' inputs."""

    hidden: list[Tensor]
    weight: Tensor
    bias: Tensor | None
    targets: list[Tensor]
    upstream: list[Tensor] = field(default_factory=list)


def make_inputs(case: Case) -> Inputs:
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(case.dtype)

    hidden = [normal(n, HIDDEN) for n in case.tokens]
    weight, bias = normal(case.vocab, HIDDEN), normal(case.vocab) if case.bias else None
    low, high = case.target_range or (0, case.vocab)
    targets, upstream = [], []
    for rank, n in enumerate(case.tokens):
        drawn = torch.randint(low, high, (n,), generator=generator)
        ignored = torch.rand(n, generator=generator) < case.ignored
        if rank in case.ignored_ranks:
            ignored = torch.ones(n, dtype=torch.bool)
        targets.append(torch.where(ignored, case.ignore_index, drawn))
        if case.reduction == "none":
            weights = torch.rand(n, generator=generator, dtype=torch.float64).to(case.dtype)
            weights[::3] = 0
            upstream.append(weights)
        else:
            value = case.upstream[rank] if case.upstream else 1.0
            upstream.append(torch.tensor(value, dtype=case.dtype))
    return Inputs(hidden, weight, bias, targets, upstream)


def dense(case: Case) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor | None]:
    """``(losses, hidden gradients, weight gradient, bias gradient)`` of a dense head in float64."""
    inputs = make_inputs(case)
    hidden = [h.double().requires_grad_() for h in inputs.hidden]
    weight = inputs.weight.double().requires_grad_()
    bias = None if inputs.bias is None else inputs.bias.double().requires_grad_()
    counted = sum(int((t != case.ignore_index).sum()) for t in inputs.targets)
    divisor = max(1, counted if case.token_count is None else case.token_count)
    losses = []
    for h, t in zip(hidden, inputs.targets, strict=True):
        loss = functional.cross_entropy(
            functional.linear(h, weight, bias), t, ignore_index=case.ignore_index, reduction="none"
        )
        if case.reduction != "none":
            loss = loss.sum() / (divisor if case.reduction == "mean" else 1)
        losses.append(loss)
    torch.autograd.backward(losses, [u.double() for u in inputs.upstream])
    return (
        [loss.detach() for loss in losses],
        [h.grad if h.grad is not None else torch.zeros_like(h) for h in hidden],
        weight.grad if weight.grad is not None else torch.zeros_like(weight),
        None if bias is None else bias.grad,
    )


def run(ranks: Ranks, case: Case) -> dict[str, Any]:
    """This rank's loss and gradients from the operator."""
    inputs = make_inputs(case)
    start, rows = case.shards.starts[ranks.rank], case.shards.rows[ranks.rank]
    hidden = inputs.hidden[ranks.rank].requires_grad_()
    weight = inputs.weight[start : start + rows].clone().requires_grad_()
    bias = None if inputs.bias is None else inputs.bias[start : start + rows].clone().requires_grad_()
    loss = ring_dtp(
        hidden,
        weight,
        inputs.targets[ranks.rank],
        ranks=ranks,
        mode=case.mode,
        strip_rows=case.strip_rows,
        bias=bias,
        ignore_index=case.ignore_index,
        reduction=case.reduction,
        token_count=case.token_count,
        gradient_hop=case.gradient_hop,
    )
    assert loss.requires_grad
    loss.backward(inputs.upstream[ranks.rank])
    return {
        "loss": loss.detach(),
        "hidden": hidden.grad,
        "weight": weight.grad,
        "bias": None if bias is None else bias.grad,
    }


def worst_errors(ranks: Ranks, cases: Sequence[Case]) -> list[float]:
    """Largest deviation of this rank's loss and gradients from the dense head, case by case."""
    errors = []
    for case in cases:
        mine = run(ranks, case)
        losses, d_hidden, d_weight, d_bias = dense(case)
        start, rows = case.shards.starts[ranks.rank], case.shards.rows[ranks.rank]
        pairs = [
            (mine["loss"], losses[ranks.rank]),
            (mine["hidden"], d_hidden[ranks.rank]),
            (mine["weight"], d_weight[start : start + rows]),
        ]
        if d_bias is not None:
            pairs.append((mine["bias"], d_bias[start : start + rows]))
        worst = 0.0
        for got, right in pairs:
            assert got is not None
            assert got.shape == right.shape, case
            if got.numel():
                difference = float((got.double() - right).abs().max())
                worst = max(worst, difference if difference == difference else float("inf"))
        errors.append(worst)
    return errors
