"""AdamW arithmetic shared by the engines: one set of hyperparameters, one fused update, one rule for masters.

The update is torch's fused AdamW (``torch._fused_adamw_``), the kernel that ``torch.optim.AdamW(fused=True)``
runs, on slices. On CUDA each element is computed alone, so any cut gives the same bits. The CPU kernel computes
whole vectors and then a scalar tail that rounds differently: slices that start and end on a multiple of 64
elements of their parameter (or at its end) give the bits of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from operators.errors import RuleError


@dataclass(frozen=True)
class Hyper:
    """What a parameter group sets, checked."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Hyper:
        """Read a torch parameter group.

        Raises:
            RuleError: a value is outside its range, or ``lr`` is a tensor on a device (reading it would sync).
        """
        lr = group["lr"]
        if isinstance(lr, Tensor):
            if lr.device.type != "cpu":
                raise RuleError(
                    rule="lr is a number or a CPU tensor: reading it from a device would stop the stream",
                    value=f"tensor on {lr.device}",
                    remedy="Pass a float.",
                )
            lr = float(lr)
        beta1, beta2 = group["betas"]
        for name, value, fits in (
            ("lr", lr, lr >= 0),
            ("betas[0]", beta1, 0 <= beta1 < 1),
            ("betas[1]", beta2, 0 <= beta2 < 1),
            ("eps", group["eps"], group["eps"] >= 0),
            ("weight_decay", group["weight_decay"], group["weight_decay"] >= 0),
        ):
            if not (fits and math.isfinite(value)):
                raise RuleError(
                    rule=f"{name} must be finite and in AdamW's range",
                    value=value,
                    remedy="lr, eps and weight_decay are at least 0; betas lie in [0, 1).",
                )
        return cls(lr, beta1, beta2, group["eps"], group["weight_decay"])


def fused_adamw(
    hyper: Hyper,
    *,
    masters: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
) -> None:
    """One AdamW step in place on lists of fp32 slices of one device.

    Args:
        steps: one-element fp32 tensors on the same device, already counting this step.
    """
    torch._fused_adamw_(
        list(masters),
        list(grads),
        list(exp_avgs),
        list(exp_avg_sqs),
        [],
        list(steps),
        lr=hyper.lr,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        amsgrad=False,
        maximize=False,
    )


def adopt_weights(master: Tensor, weight: Tensor, workspace: Tensor) -> None:
    """Rebuild a master from weights that somebody else wrote, only where they differ.

    ``master`` becomes ``weight`` where it does not round to it, and stays where it does: a checkpoint's masters
    survive when its weights are loaded after them. No value is read on the host.

    Args:
        master: ``[n]`` fp32, changed in place.
        weight: ``[n]`` bf16 or fp32, same device.
        workspace: ``[n]`` fp32 on the same device, overwritten.
    """
    if weight.dtype == torch.float32:
        master.copy_(weight)
        return
    n = master.numel()
    raw = workspace.view(torch.uint8)
    rounded = raw[: 2 * n].view(weight.dtype)
    mask = raw[2 * n : 3 * n].view(torch.bool)
    rounded.copy_(master)
    # Adding -0.0 leaves every float as it is, so the two halves are merged by one exact addition.
    torch.ne(rounded, weight, out=mask)
    master.masked_fill_(mask, -0.0)
    torch.logical_not(mask, out=mask)
    rounded.copy_(weight)
    rounded.masked_fill_(mask, -0.0)
    master.add_(rounded)


def local_norm(grads: Sequence[Tensor]) -> Tensor:
    """2-norm over all ``grads``, one fp32 element on their device, without a sync."""
    norms: tuple[Tensor, ...] = torch._foreach_norm(list(grads), 2.0, dtype=torch.float32)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), 2.0)
    return total


def clip_coefficient(total_norm: Tensor, max_norm: float) -> Tensor:
    """``min(1, max_norm / (total_norm + 1e-6))``, as ``torch.nn.utils.clip_grad_norm_`` has it."""
    return torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
