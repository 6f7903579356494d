"""Heads that Ring-DTP is measured against: materialised logits, and torch's own chunked loss.

Shapes: N tokens, V vocabulary, H hidden width. Both hold the whole head on one rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from operators.errors import RuleError
from operators.ring_dtp import Reduction


def materialised_head(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """Cross-entropy over logits ``[N, V]`` that exist whole, the loss in fp32 (fp64 for fp64 inputs).

    Peak in fp32, forward and backward: 3·N·V + V·H + N·H scalars (logits, log-softmax, their gradient).
    Differs from :func:`operators.ring_dtp.ring_dtp` in the mean of no counted target at all: NaN.
    """
    logits_NV = functional.linear(hidden_NH, weight_VH, bias)
    if logits_NV.dtype not in (torch.float32, torch.float64):
        logits_NV = logits_NV.float()
    return functional.cross_entropy(logits_NV, targets_N, ignore_index=ignore_index, reduction=reduction)


def has_torch_chunked_head() -> bool:
    """Whether this torch has ``F.linear_cross_entropy`` (2.13 and later)."""
    return hasattr(functional, "linear_cross_entropy")


def torch_chunked_head(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    **options: Any,
) -> Tensor:
    """Torch's chunked linear cross-entropy, with its default chunking.

    Args:
        options: fields of ``torch.nn.LinearCrossEntropyOptions``.

    Raises:
        RuleError: this torch has none.
    """
    if not has_torch_chunked_head():
        raise RuleError(
            rule="torch's chunked linear cross-entropy needs torch >= 2.13",
            value=torch.__version__,
            remedy="Use ring_dtp with mode='gather', which needs no particular torch.",
        )
    chunking = torch.nn.LinearCrossEntropyOptions(**options)
    loss: Tensor = functional.linear_cross_entropy(
        hidden_NH,
        weight_VH,
        targets_N,
        linear_bias=bias,
        ignore_index=ignore_index,
        reduction=reduction,
        options=chunking,
    )
    return loss
