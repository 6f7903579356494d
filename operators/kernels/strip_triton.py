"""Triton kernels of the strip epilogues (see :mod:`operators.kernels.strip` for what they compute).

One program reads a row in blocks, each block once: a tile is read once for its statistics, and read and
written once for its gradient. Offsets of rows are 64-bit: a tile may have more than 2³¹ elements.
The shard's width is a constant of the statistics kernel: a head has one or two widths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_WARPS = 8


@triton.jit(do_not_specialize=["first_id"])  # type: ignore[untyped-decorator]
def _statistics_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    tile,
    stride,
    bias,
    targets,
    first_id,
    out,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = tile + row * stride
    top = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, COLUMNS, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < COLUMNS
        y = tl.load(base + at, mask=inside, other=-float("inf")).to(tl.float32)
        if HAS_BIAS:
            y += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
        higher = tl.maximum(top, tl.max(y, axis=0))
        # all −∞ so far: −∞ − −∞ would be NaN
        reference = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(top - reference) + tl.sum(tl.exp(y - reference), axis=0)
        top = higher
    local = tl.load(targets + row) - first_id
    here = (local >= 0) & (local < COLUMNS)
    picked = tl.load(base + local, mask=here, other=0.0).to(tl.float32)
    if HAS_BIAS:
        picked += tl.load(bias + local, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * 3, top)
    tl.store(out + row * 3 + 1, total)
    tl.store(out + row * 3 + 2, picked)


@triton.jit(do_not_specialize=["first_id"])  # type: ignore[untyped-decorator]
def _gradient_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    tile,
    stride,
    bias,
    targets,
    first_id,
    log_sum_exp,
    upstream,
    columns,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    where = tile + row * stride + at
    y = tl.load(where, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(log_sum_exp + row)
    shift = tl.where(shift == -float("inf"), float("inf"), shift)
    scale = tl.load(upstream + row)
    local = tl.load(targets + row) - first_id
    gradient = tl.exp(y - shift) - tl.where(at == local, 1.0, 0.0)
    gradient = tl.where(scale == 0.0, 0.0, gradient * scale)
    tl.store(where, gradient.to(tile.dtype.element_ty), mask=inside)


def statistics(
    tile_nv: Tensor, bias_v: Tensor | None, targets_n: Tensor, first_id: int, out_n3: Tensor
) -> None:
    """Statistics of a tile with v ≥ 1 columns; contiguous ``targets_n`` and fp32 ``out_n3``."""
    rows, columns = tile_nv.shape
    if rows == 0:
        return
    with _device(tile_nv):
        _statistics_kernel[(rows,)](
            tile_nv,
            tile_nv.stride(0),
            tile_nv if bias_v is None else bias_v,
            targets_n,
            first_id,
            out_n3,
            COLUMNS=columns,
            HAS_BIAS=bias_v is not None,
            BLOCK=min(_BLOCK, triton.next_power_of_2(columns)),
            num_warps=_WARPS,
        )


def gradient_(
    tile_nv: Tensor,
    bias_v: Tensor | None,
    targets_n: Tensor,
    first_id: int,
    *,
    log_sum_exp_n: Tensor,
    upstream_n: Tensor,
) -> None:
    """Gradient in place of a tile with v ≥ 1 columns; contiguous per-row inputs, fp32."""
    rows, columns = tile_nv.shape
    if rows == 0:
        return
    block = min(_BLOCK, triton.next_power_of_2(columns))
    with _device(tile_nv):
        _gradient_kernel[(rows, triton.cdiv(columns, block))](
            tile_nv,
            tile_nv.stride(0),
            tile_nv if bias_v is None else bias_v,
            targets_n,
            first_id,
            log_sum_exp_n,
            upstream_n,
            columns,
            HAS_BIAS=bias_v is not None,
            BLOCK=block,
            num_warps=_WARPS,
        )


def _device(tile_nv: Tensor) -> torch.cuda.device:
    """Triton launches on the current device; make it the tile's (-1 leaves it alone, for the interpreter)."""
    return torch.cuda.device(tile_nv.device if tile_nv.is_cuda else -1)
