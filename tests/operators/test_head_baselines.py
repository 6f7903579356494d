"""The heads that Ring-DTP is compared with agree with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from operators import head_baselines
from operators.errors import RuleError
from operators.ranks import LoopbackRanks
from operators.ring_dtp import Reduction, ring_dtp


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(9, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(21, 8, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, 21, (9,))
    targets[2] = -100
    return hidden, weight, torch.randn(21, dtype=dtype), targets


_BASELINES: list[tuple[str, Reduction]] = [("materialised_head", r) for r in ("none", "mean", "sum")]
if head_baselines.has_torch_chunked_head():
    _BASELINES += [("torch_chunked_head", "mean"), ("torch_chunked_head", "sum")]


@pytest.mark.parametrize(("name", "reduction"), _BASELINES)
def test_baseline_equals_the_ring_of_one(name: str, reduction: Reduction) -> None:
    hidden, weight, bias, targets = _inputs(torch.float64)
    baseline = getattr(head_baselines, name)
    loss = baseline(hidden, weight, targets, bias=bias, reduction=reduction)
    ours = ring_dtp(hidden, weight, targets, ranks=LoopbackRanks(1), bias=bias, reduction=reduction)
    torch.testing.assert_close(ours, loss, rtol=0, atol=1e-12)
    gradients = torch.autograd.grad(loss.sum(), (hidden, weight))
    for got, right in zip(torch.autograd.grad(ours.sum(), (hidden, weight)), gradients, strict=True):
        torch.testing.assert_close(got, right, rtol=0, atol=1e-12)


def test_materialised_bf16_takes_its_loss_in_fp32() -> None:
    hidden, weight, bias, targets = _inputs(torch.bfloat16)
    loss = head_baselines.materialised_head(hidden, weight, targets, bias=bias)
    logits = functional.linear(hidden, weight, bias).float()
    assert torch.equal(loss, functional.cross_entropy(logits, targets))
    assert loss.dtype is torch.float32


def test_an_older_torch_is_told_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(functional, "linear_cross_entropy", raising=False)
    hidden, weight, _, targets = _inputs(torch.float32)
    with pytest.raises(RuleError, match=r"torch >= 2\.13"):
        head_baselines.torch_chunked_head(hidden, weight, targets)
