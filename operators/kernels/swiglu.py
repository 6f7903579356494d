"""The gated activation of an expert, and its derivative, in one pass each.

Triton on CUDA tensors, plain torch elsewhere; same interface. Computed in float32 (float64 for float64).

Shape suffixes: R rows, I intermediate width, G = 2I gate and up values of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from operators.kernels.route import accumulation_dtype, hollow, row_blocks, use_triton

try:
    from operators.kernels import swiglu_triton as _triton
except ImportError:  # Triton is optional; the torch path below is complete
    _triton = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Gate:
    """Which gated activation an expert applies.

    ``limit`` None is SwiGLU, ``silu(gate) · up`` (Qwen, DeepSeek, Mixtral). With a limit it is gpt-oss's:
    gate clamped from above, up to ±limit, ``gate · sigmoid(alpha · gate) · (up + 1)``.
    ``interleaved``: gate and up alternate along G (gpt-oss) instead of gate first, up after.
    """

    alpha: float = 1.0
    limit: float | None = None
    interleaved: bool = False

    def split(self, values_RG: Tensor) -> tuple[Tensor, Tensor]:
        """Views of gate and up, ``[R, I]`` each."""
        if self.interleaved:
            return values_RG[:, 0::2], values_RG[:, 1::2]
        half = values_RG.shape[1] // 2
        return values_RG[:, :half], values_RG[:, half:]


SWIGLU = Gate()
GPT_OSS = Gate(alpha=1.702, limit=7.0, interleaved=True)


def gated(gate: Gate, values_RG: Tensor) -> Tensor:
    """The activation ``[R, I]``, new."""
    rows, double = values_RG.shape
    out_RI = values_RG.new_empty(rows, double // 2)
    if rows == 0 or hollow(values_RG):
        return out_RI
    if use_triton(values_RG):
        _triton.forward(gate, values_RG, out_RI)
        return out_RI
    wide = accumulation_dtype(values_RG.dtype)
    starts = row_blocks(rows)
    for start in starts:
        block = slice(start, min(start + starts.step, rows))
        g, u = (half.to(wide) for half in gate.split(values_RG[block]))
        if gate.limit is not None:
            g = g.clamp(max=gate.limit)
            u = u.clamp(-gate.limit, gate.limit) + 1
        out_RI[block].copy_(torch.sigmoid(g * gate.alpha).mul_(g).mul_(u))
    return out_RI


def gated_backward_(gate: Gate, values_RG: Tensor, upstream_RI: Tensor, weights_R: Tensor) -> Tensor:
    """Recompute the activation h and differentiate, in place.

    The rows' router weights come in here, so that neither the gradient rows nor the weights' own gradient need
    the expert's output again: with g = dY·W₂ (unweighted), ``dw = <g, h>`` and the second layer's weight
    gradient is ``dYᵀ (w·h)``.

    Args:
        values_RG: Gate and up values in, their gradients (of w·g) out.
        upstream_RI: g in, ``w · h`` out.
        weights_R: Router weights of the rows, accumulation dtype.

    Returns:
        ``<g, h>`` of each row, ``[R]``, accumulation dtype.
    """
    rows = values_RG.shape[0]
    dots_R = weights_R.new_empty(rows)
    if rows == 0 or hollow(values_RG):
        return dots_R
    if use_triton(values_RG):
        _triton.backward(gate, values_RG, upstream_RI, weights_R, dots_R)
        return dots_R
    wide = accumulation_dtype(values_RG.dtype)
    starts = row_blocks(rows)
    for start in starts:
        block = slice(start, min(start + starts.step, rows))
        g_view, u_view = gate.split(values_RG[block])
        g_raw, u_raw = g_view.to(wide), u_view.to(wide)
        g, u = g_raw, u_raw
        if gate.limit is not None:
            g = g_raw.clamp(max=gate.limit)
            u = u_raw.clamp(-gate.limit, gate.limit) + 1
        upstream = upstream_RI[block].to(wide)
        weight = weights_R[block].unsqueeze(1)
        sigma = torch.sigmoid(g * gate.alpha)
        act = sigma * g
        h = act * u
        dots_R[block] = (upstream * h).sum(dim=1)
        dh = upstream * weight
        upstream_RI[block].copy_(h * weight)  # `upstream` may be this very block: read before
        d_up = dh * act
        d_gate = dh * u * (sigma + gate.alpha * act * (1 - sigma))
        if gate.limit is not None:
            d_up.mul_(u_raw.abs() <= gate.limit)
            d_gate.mul_(g_raw <= gate.limit)
        g_view.copy_(d_gate)
        u_view.copy_(d_up)
    return dots_R
