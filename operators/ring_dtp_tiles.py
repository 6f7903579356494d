"""Row tiles of a logits strip: the GEMMs of Ring-DTP and the one buffer they share.

Shapes: N tokens (n in a tile), V vocabulary rows of one weight shard, H hidden width.

A strip Y = X·Wᵀ of N × V logits never exists whole: tiles of at most ``strip_rows`` rows pass through one
buffer. Nothing else of a tile's size is allocated: GEMMs write into the buffer or add into an accumulator.
Accumulators are fp32 (fp64 for fp64 inputs), so the weight gradient's error does not grow with the tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from operators.bounds.ring_dtp import padded_columns
from operators.kernels.strip import has_data, strip_gradient_, strip_statistics

_ALIGN = 64
_CAST_ROWS = 256


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64 inputs, fp32 for every other."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def tile_rows(tokens: int, strip_rows: int) -> int:
    """Rows of the even tiles that cover ``tokens``: no more than ``strip_rows``, no short straggler."""
    if tokens == 0:
        return 0
    tiles = -(-tokens // strip_rows)
    even = -(-tokens // tiles)
    return min(-(-even // _ALIGN) * _ALIGN, strip_rows)


class TileBuffer:
    """The memory of one tile of logits, at most ``rows`` × ``columns``."""

    def __init__(self, rows: int, columns: int, like: Tensor) -> None:
        self._rows = rows
        self._columns = columns
        self._flat = like.new_empty(rows * padded_columns(columns))

    def free(self) -> None:
        """Let go of the memory; no tile may be in use."""
        self._flat = self._flat.new_empty(0)

    def tiles(self, tokens: int, columns: int) -> Iterator[tuple[slice, Tensor]]:
        """Row slices that cover ``tokens``, each with the buffer as its ``[n, columns]`` tile."""
        if tokens == 0 or columns == 0:
            return
        stride = padded_columns(columns)
        step = tile_rows(tokens, self._rows)
        for start in range(0, tokens, step):
            stop = min(start + step, tokens)
            whole = self._flat[: (stop - start) * stride].view(stop - start, stride)
            yield slice(start, stop), whole[:, :columns]


@dataclass(frozen=True, slots=True)
class Strip:
    """One strip's inputs, whose tokens meet which shard: ``[N, H]``, ``[V, H]``, ``[V]``, ``[N]``."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    first_id: int

    def logits(self, rows: slice, tile_nV: Tensor) -> None:
        """The tile's logits, bias left to the epilogue."""
        torch.mm(self.hidden[rows], self.weight.t(), out=tile_nV)


def forward_strip(strip: Strip, buffer: TileBuffer, out_N3: Tensor) -> None:
    """Statistics of one strip, tile by tile, into ``out_N3`` (which holds the neutral element)."""
    for rows, tile in buffer.tiles(strip.hidden.shape[0], strip.weight.shape[0]):
        strip.logits(rows, tile)
        strip_statistics(tile, strip.bias, strip.targets[rows], strip.first_id, out_N3[rows])


def backward_strip(
    strip: Strip,
    buffer: TileBuffer,
    *,
    log_sum_exp_N: Tensor,
    upstream_N: Tensor,
    use: Callable[[slice, Tensor], None],
) -> None:
    """Replay one strip; ``use(rows, gradient_nV)`` sees the gradient of each tile of logits in turn."""
    for rows, tile in buffer.tiles(strip.hidden.shape[0], strip.weight.shape[0]):
        strip.logits(rows, tile)
        strip_gradient_(
            tile,
            strip.bias,
            strip.targets[rows],
            strip.first_id,
            log_sum_exp_n=log_sum_exp_N[rows],
            upstream_n=upstream_N[rows],
        )
        use(rows, tile)


def add_product_(sum_MN: Tensor, left_MK: Tensor, right_KN: Tensor) -> None:
    """``sum += left @ right`` with products and sum in the sum's precision, in place."""
    if sum_MN.dtype == left_MK.dtype:
        sum_MN.addmm_(left_MK, right_KN)
    elif not has_data(sum_MN):
        # the one mixed-precision overload that every device without data knows, with the same (no) temporaries
        torch.mm(left_MK, right_KN, out_dtype=sum_MN.dtype, out=sum_MN)
    elif sum_MN.is_cuda:
        torch.addmm(sum_MN, left_MK, right_KN, out_dtype=sum_MN.dtype, out=sum_MN)
    else:
        _add_cast_product_(sum_MN, left_MK, right_KN)


def write_product_(out_MN: Tensor, left_MK: Tensor, right_KN: Tensor) -> None:
    """``out = left @ right``, like :func:`add_product_` on a sum of zeros but without reading it."""
    if out_MN.dtype == left_MK.dtype:
        torch.mm(left_MK, right_KN, out=out_MN)
    elif out_MN.is_cuda or not has_data(out_MN):
        torch.mm(left_MK, right_KN, out_dtype=out_MN.dtype, out=out_MN)
    else:
        _add_cast_product_(out_MN.zero_(), left_MK, right_KN)


def _add_cast_product_(sum_MN: Tensor, left_MK: Tensor, right_KN: Tensor) -> None:
    """The same where no mixed-precision GEMM exists: operands are cast a few rows at a time."""
    for k in range(0, right_KN.shape[0], _CAST_ROWS):
        right = right_KN[k : k + _CAST_ROWS].to(sum_MN.dtype)
        for m in range(0, sum_MN.shape[0], _CAST_ROWS):
            left = left_MK[m : m + _CAST_ROWS, k : k + _CAST_ROWS].to(sum_MN.dtype)
            sum_MN[m : m + _CAST_ROWS].addmm_(left, right)
