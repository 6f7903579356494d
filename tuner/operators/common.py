"""What the adapters share: dtypes by name, seeded tensors, relative errors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from cost_model.errors import RuleError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SCALAR_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
_MIB = 2**20
# Largest relative error (against the largest entry of the reference) that rounding explains.
TOLERANCE = {"bfloat16": 4e-2, "float32": 2e-4, "float64": 1e-9}


def check_dtype(operator: str, dtype: str, allowed: tuple[str, ...] = tuple(SCALAR_BYTES)) -> str:
    """``dtype`` when the operator computes in it.

    Raises:
        RuleError: it does not.
    """
    if dtype not in allowed:
        raise RuleError(
            rule=f"{operator} computes in one of {list(allowed)}",
            value=dtype,
            remedy="Choose one of them.",
        )
    return dtype


def check_divides(what: str, whole: int, ranks: int) -> None:
    """Refuse what the ranks cannot share evenly.

    Raises:
        RuleError: ``ranks`` does not divide ``whole``.
    """
    if whole % ranks:
        raise RuleError(
            rule=f"the ranks must divide {what}",
            value=f"{whole} over {ranks} ranks",
            remedy="Change one of them.",
        )


def powers_of_two(low: int, high: int) -> tuple[int, ...]:
    """Powers of two in ``[low, high]``; ``high`` itself when there is none."""
    found = tuple(1 << n for n in range(63) if low <= 1 << n <= high)
    return found or (high,)


def torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


def normal(*shape: int, seed: int, dtype: str, device: str, scale: float = 1.0) -> Tensor:
    """Normal values that depend on ``seed`` and on the kind of device, and on nothing else.

    They are drawn where they are used: a layer of real size has a billion of them, seconds on a CPU.
    """
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    values = torch.randn(*shape, generator=generator, device=device).mul_(scale)
    return values.to(dtype=torch_dtype(dtype))


def block_slack(*tensors: int) -> int:
    """Bytes that a CUDA allocator may count above ``tensors``, bytes each: it cuts no block to leave 1 MiB or less.

    Small tensors (up to 1 MiB) are rounded to 512 bytes.
    """
    return sum(_MIB if one > _MIB else -one % 512 for one in tensors)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the reference's largest entry; 0 for nothing to compare, NaN stays NaN."""
    if expected.numel() == 0:
        return 0.0
    scale = max(float(expected.double().abs().max()), 1e-12)
    return float((found.double() - expected.double()).abs().max()) / scale


def worst(errors: list[float]) -> float:
    """The largest; NaN when any is."""
    return next((e for e in errors if math.isnan(e)), max(errors))


def drop_gradients(*leaves: Any) -> None:
    """Forget the gradients of the last repetition."""
    for leaf in leaves:
        leaf.grad = None
