# ruff: noqa: PLR0917 - kernels take their pointers in order
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Triton kernels behind :mod:`operators.kernels.route`. Importing this module needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _gather_kernel(source, index, out, source_stride, out_stride, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    origin = tl.load(index + row).to(tl.int64)
    for start in range(0, COLUMNS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < COLUMNS
        value = tl.load(source + origin * source_stride + column, mask=mask)
        tl.store(out + row * out_stride + column, value, mask=mask)


@triton.jit
def _combine_kernel(
    rows,
    positions,
    weights,
    out,
    row_stride,
    position_stride,
    weight_stride,
    out_stride,
    COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, COLUMNS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < COLUMNS
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for j in tl.static_range(TOP_K):
            position = tl.load(positions + token * position_stride + j).to(tl.int64)
            value = tl.load(rows + position * row_stride + column, mask=mask, other=0.0).to(tl.float32)
            if WEIGHTED:
                value = value * tl.load(weights + token * weight_stride + j)
            total += value
        tl.store(out + token * out_stride + column, total.to(out.dtype.element_ty), mask=mask)


def _block(columns: int) -> int:
    """Largest power of two up to 2048 that divides the columns, so that no lane idles; else a covering one."""
    block: int = columns & -columns
    return min(block, 2048) if block >= 256 else min(2048, int(triton.next_power_of_2(columns)))


def gather(source_QH: Tensor, index_R: Tensor, out_RH: Tensor) -> None:
    """See :func:`operators.kernels.route.gather_rows`."""
    columns = source_QH.shape[1]
    _gather_kernel[(index_R.shape[0],)](
        source_QH,
        index_R,
        out_RH,
        source_QH.stride(0),
        out_RH.stride(0),
        COLUMNS=columns,
        BLOCK=_block(columns),
    )


def combine(rows_QH: Tensor, positions_CK: Tensor, weights_CK: Tensor | None, out_CH: Tensor) -> None:
    """See :func:`operators.kernels.route.combine_rows`."""
    columns = rows_QH.shape[1]
    weighted = weights_CK is not None
    weights = weights_CK if weights_CK is not None else rows_QH
    assert weights.dtype == torch.float32 or not weighted
    _combine_kernel[(positions_CK.shape[0],)](
        rows_QH,
        positions_CK,
        weights,
        out_CH,
        rows_QH.stride(0),
        positions_CK.stride(0),
        weights.stride(0),
        out_CH.stride(0),
        COLUMNS=columns,
        TOP_K=positions_CK.shape[1],
        WEIGHTED=weighted,
        BLOCK=_block(columns),
    )
