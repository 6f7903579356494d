"""Epilogues of a logits tile: its statistics in one pass, and the softmax gradient in its place.

Shapes: n rows (tokens) of a tile, v columns (vocabulary ids of one shard).

Two implementations with one interface: Triton kernels for tiles on the GPU, and a torch path for everything
else. The torch path works through blocks of rows, so its temporaries stay small
(:func:`operators.bounds.ring_dtp.scratch_elements`). Sums are fp32 (fp64 for fp64 tiles) whatever the tile's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from operators.strip_fold import neutral

try:
    from operators.kernels import strip_triton as _triton
except ImportError:  # no Triton on this machine
    _triton = None  # type: ignore[assignment]

_SCRATCH_ELEMENTS = 1 << 18


def has_data(x: Tensor) -> bool:
    """False for shapes without data: meta tensors and the fake tensors of a dry run."""
    return not x.is_meta and not isinstance(x, FakeTensor)


def uses_triton(tile_nv: Tensor) -> bool:
    """Whether this tile goes to the Triton kernels: real data on the GPU, not fp64."""
    return (
        _triton is not None and tile_nv.is_cuda and tile_nv.dtype is not torch.float64 and has_data(tile_nv)
    )


def strip_statistics(
    tile_nv: Tensor, bias_v: Tensor | None, targets_n: Tensor, first_id: int, out_n3: Tensor
) -> None:
    """Write (max, Σ e^{y − max}, target's logit) of every row.

    Args:
        tile_nv: logits without bias, bf16, fp32 or fp64; rows may be strided. Unchanged.
        bias_v: added to the logits, or None.
        targets_n: int64 vocabulary ids; an id outside this shard leaves target logit 0.
        first_id: vocabulary id of column 0.
        out_n3: fp32 (fp64 for an fp64 tile), written.
    """
    if tile_nv.shape[1] == 0:
        neutral(out_n3)
        return
    if uses_triton(tile_nv):
        _triton.statistics(tile_nv, bias_v, targets_n, first_id, out_n3)
        return
    for rows in _blocks(tile_nv):
        block = _with_bias(tile_nv[rows], bias_v, out_n3.dtype)
        top = block.amax(dim=1)
        out_n3[rows, 0] = top
        local, inside = _local_targets(targets_n[rows], first_id, block.shape[1])
        picked = block.gather(1, local.unsqueeze(1)).squeeze(1)
        out_n3[rows, 2] = torch.where(inside, picked, 0.0)
        reference = torch.where(top == -torch.inf, 0.0, top).unsqueeze(1)
        block = (
            block - reference if block.dtype == tile_nv.dtype and bias_v is None else block.sub_(reference)
        )
        out_n3[rows, 1] = block.exp_().sum(dim=1)


def strip_gradient_(
    tile_nv: Tensor,
    bias_v: Tensor | None,
    targets_n: Tensor,
    first_id: int,
    *,
    log_sum_exp_n: Tensor,
    upstream_n: Tensor,
) -> None:
    """Turn logits into the gradient of the loss by them: (softmax − one-hot) · upstream, in place.

    A row whose upstream is 0 (an ignored target) becomes 0 whatever its logits; a row whose log-sum-exp is
    −∞ has softmax 0.

    Args:
        tile_nv: logits without bias; becomes the gradient, in its own dtype.
        log_sum_exp_n, upstream_n: fp32 (fp64 for an fp64 tile).
    """
    if tile_nv.shape[1] == 0:
        return
    if uses_triton(tile_nv):
        _triton.gradient_(
            tile_nv, bias_v, targets_n, first_id, log_sum_exp_n=log_sum_exp_n, upstream_n=upstream_n
        )
        return
    shift_n = torch.where(log_sum_exp_n == -torch.inf, torch.inf, log_sum_exp_n)
    for rows in _blocks(tile_nv):
        view = tile_nv[rows]
        block = view if view.dtype == shift_n.dtype else view.to(shift_n.dtype)
        if bias_v is not None:
            block.add_(bias_v)
        local, inside = _local_targets(targets_n[rows], first_id, block.shape[1])
        block.sub_(shift_n[rows].unsqueeze(1)).exp_()
        block.scatter_add_(1, local.unsqueeze(1), -inside.to(block.dtype).unsqueeze(1))
        scale = upstream_n[rows].unsqueeze(1)
        block.mul_(scale).masked_fill_(scale == 0, 0.0)
        if block is not view:
            view.copy_(block)


def _blocks(tile_nv: Tensor) -> list[slice]:
    step = max(1, _SCRATCH_ELEMENTS // tile_nv.shape[1])
    rows = tile_nv.shape[0] if has_data(tile_nv) else min(step, tile_nv.shape[0])  # one block shows the bytes
    return [slice(a, min(a + step, rows)) for a in range(0, rows, step)]


def _with_bias(block: Tensor, bias_v: Tensor | None, dtype: torch.dtype) -> Tensor:
    block = block.to(dtype)
    return block if bias_v is None else block + bias_v


def _local_targets(targets_n: Tensor, first_id: int, columns: int) -> tuple[Tensor, Tensor]:
    """Column of each target, clamped into the tile, and whether it really lies there."""
    local = targets_n - first_id
    inside = (local >= 0) & (local < columns)
    return local.clamp(0, columns - 1), inside
