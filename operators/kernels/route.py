"""Moving rows: gather by index, and the top-k weighted sum that brings routes home.

Triton on CUDA tensors, plain torch elsewhere; same interface, same order of additions, no atomics. Row offsets
are 64-bit: 300,000 rows of 7,168 already pass 2^31 elements.

Shape suffixes: R rows out, Q rows in, H hidden width, C tokens, K experts a token picks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

try:
    from operators.kernels import route_triton as _triton
except ImportError:  # Triton is optional; the torch path below is complete
    _triton = None  # type: ignore[assignment]

# Rows of a torch fallback are worked in blocks, so that its temporaries stay small beside the operands.
_BLOCKS = 64


def use_triton(x: Tensor) -> bool:
    """Whether the Triton path runs for ``x``."""
    return _triton is not None and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


def hollow(x: Tensor) -> bool:
    """Whether ``x`` has no values (a dry run): a fused kernel then only allocates what it returns."""
    return isinstance(x, FakeTensor)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays, everything else accumulates in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_blocks(rows: int) -> range:
    """Starts of row blocks; the step is the block length."""
    return range(0, rows, max(1, -(-rows // _BLOCKS), min(rows, 16)))


def gather_rows(source_QH: Tensor, index_R: Tensor) -> Tensor:
    """``out[r] = source[index[r]]`` as a new contiguous ``[R, H]``.

    Args:
        source_QH: Rows, last dimension contiguous.
        index_R: int32 or int64 row numbers.
    """
    out_RH = source_QH.new_empty(index_R.shape[0], source_QH.shape[1])
    if out_RH.numel() == 0 or hollow(source_QH):
        return out_RH
    if use_triton(source_QH):
        _triton.gather(source_QH, index_R, out_RH)
    else:
        torch.index_select(source_QH, 0, index_R, out=out_RH)
    return out_RH


def combine_rows(rows_QH: Tensor, positions_CK: Tensor, weights_CK: Tensor | None, out_CH: Tensor) -> None:
    """``out[c] = Σ_j weights[c, j] · rows[positions[c, j]]``, added in the order of j, in float32 or wider.

    Args:
        rows_QH: Rows that came back.
        positions_CK: int32, where each route of a token lies in ``rows``; last dimension contiguous.
        weights_CK: Weights in the accumulation dtype, or None for a plain sum.
        out_CH: Written in place; its rows may be strided.
    """
    tokens, top_k = positions_CK.shape
    if tokens == 0 or hollow(rows_QH):
        return
    if use_triton(rows_QH):
        _triton.combine(rows_QH, positions_CK, weights_CK, out_CH)
        return
    wide = accumulation_dtype(rows_QH.dtype)
    starts = row_blocks(tokens)
    for start in starts:
        block = slice(start, min(start + starts.step, tokens))
        total: Tensor | None = None
        for j in range(top_k):
            term = rows_QH.index_select(0, positions_CK[block, j]).to(wide)
            if weights_CK is not None:
                term.mul_(weights_CK[block, j : j + 1])
            total = term if total is None else total.add_(term)
        if total is not None:
            out_CH[block].copy_(total)
