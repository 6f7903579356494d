# ruff: noqa: PLR0917 - kernels take their pointers in order
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Triton kernels behind :mod:`operators.kernels.swiglu`. Importing this module needs Triton.

One program a row: the row's dot product is summed in a fixed order, without atomics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from operators.kernels.swiglu import Gate


@triton.jit
def _forward_kernel(
    values,
    out,
    values_stride,
    out_stride,
    alpha,
    limit,
    WIDTH: tl.constexpr,
    CLAMPED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    values += row * values_stride
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < WIDTH
        gate_at = column * 2 if INTERLEAVED else column
        up_at = column * 2 + 1 if INTERLEAVED else column + WIDTH
        g = tl.load(values + gate_at, mask=mask, other=0.0).to(tl.float32)
        u = tl.load(values + up_at, mask=mask, other=0.0).to(tl.float32)
        if CLAMPED:
            g = tl.minimum(g, limit)
            u = tl.minimum(tl.maximum(u, -limit), limit) + 1.0
        h = g * tl.sigmoid(g * alpha) * u
        tl.store(out + row * out_stride + column, h.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    values,
    upstream,
    weights,
    dots,
    values_stride,
    upstream_stride,
    alpha,
    limit,
    WIDTH: tl.constexpr,
    CLAMPED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    values += row * values_stride
    upstream += row * upstream_stride
    weight = tl.load(weights + row)
    dot = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < WIDTH
        gate_at = column * 2 if INTERLEAVED else column
        up_at = column * 2 + 1 if INTERLEAVED else column + WIDTH
        g_raw = tl.load(values + gate_at, mask=mask, other=0.0).to(tl.float32)
        u_raw = tl.load(values + up_at, mask=mask, other=0.0).to(tl.float32)
        d = tl.load(upstream + column, mask=mask, other=0.0).to(tl.float32)
        g = g_raw
        u = u_raw
        if CLAMPED:
            g = tl.minimum(g_raw, limit)
            u = tl.minimum(tl.maximum(u_raw, -limit), limit) + 1.0
        sigma = tl.sigmoid(g * alpha)
        act = g * sigma
        h = act * u
        dot += d * h
        dh = d * weight
        d_up = dh * act
        d_gate = dh * u * (sigma + alpha * act * (1.0 - sigma))
        if CLAMPED:
            d_up = tl.where(tl.abs(u_raw) <= limit, d_up, 0.0)
            d_gate = tl.where(g_raw <= limit, d_gate, 0.0)
        tl.store(values + gate_at, d_gate.to(values.dtype.element_ty), mask=mask)
        tl.store(values + up_at, d_up.to(values.dtype.element_ty), mask=mask)
        tl.store(upstream + column, (h * weight).to(upstream.dtype.element_ty), mask=mask)
    tl.store(dots + row, tl.sum(dot, axis=0))


def _block(width: int) -> int:
    return min(2048, int(triton.next_power_of_2(width)))


def forward(gate: Gate, values_RG: Tensor, out_RI: Tensor) -> None:
    """See :func:`operators.kernels.swiglu.gated`."""
    width = out_RI.shape[1]
    _forward_kernel[(values_RG.shape[0],)](
        values_RG,
        out_RI,
        values_RG.stride(0),
        out_RI.stride(0),
        float(gate.alpha),
        float(gate.limit or 0.0),
        WIDTH=width,
        CLAMPED=gate.limit is not None,
        INTERLEAVED=gate.interleaved,
        BLOCK=_block(width),
    )


def backward(gate: Gate, values_RG: Tensor, upstream_RI: Tensor, weights_R: Tensor, dots_R: Tensor) -> None:
    """See :func:`operators.kernels.swiglu.gated_backward_`."""
    width = upstream_RI.shape[1]
    _backward_kernel[(values_RG.shape[0],)](
        values_RG,
        upstream_RI,
        weights_R,
        dots_R,
        values_RG.stride(0),
        upstream_RI.stride(0),
        float(gate.alpha),
        float(gate.limit or 0.0),
        WIDTH=width,
        CLAMPED=gate.limit is not None,
        INTERLEAVED=gate.interleaved,
        BLOCK=_block(width),
    )
