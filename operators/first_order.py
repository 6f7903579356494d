"""Backward passes that have no gradient of their own say so.

A communicating backward pass is opaque to autograd. ``torch.autograd.function.once_differentiable`` notices a second
differentiation only where the upstream gradient needs one; with ``loss.backward(create_graph=True)`` it does not, and
gradients of gradients would lack this operator's part in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def first_order(
    backward: Callable[..., tuple[Tensor | None, ...]],
) -> Callable[..., tuple[Tensor | None, ...]]:
    """A ``Function.backward`` whose gradients raise a ``RuntimeError`` when they are differentiated again."""

    @wraps(backward)
    def run(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            gradients = backward(ctx, *upstream)
        if not torch.is_grad_enabled():
            return gradients
        told = f"{ctx.name()}: flatpeak's operators offer no gradients of gradients".encode()
        marked = [None if g is None else g.detach().requires_grad_() for g in gradients]
        refused: tuple[Tensor | None, ...] = torch._C._functions.DelayedError(told, len(marked))(*marked)  # type: ignore[arg-type]
        return refused

    return run
