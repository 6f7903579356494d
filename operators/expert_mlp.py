"""The experts' two layers over rows in slot order, and their gradients.

bfloat16 on a GPU with few rows an expert goes through ``grouped_mm``; with many rows one dense matmul an
expert is 1 to 3 % faster (measured from 2,048 rows an expert up) and writes straight into its place. Other
dtypes always loop.

Shape suffixes: R rows of a chunk, H hidden width, I intermediate width, G = 2I, E local experts, O and X the
two widths of either layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from operators.dispatch_plan import DispatchPlan
from operators.kernels.route import accumulation_dtype, hollow
from operators.kernels.swiglu import Gate
from operators.ranks import Ranks

# Below this many rows an expert, a dense matmul no longer fills the device and its launches show: on an H200 the
# grouped one takes 0.83 of its time at 512 rows, both take the same at 1,024 (docs/benchmarks.md).
GROUPED_BELOW_ROWS = 1024
_ACCUMULATE_ROWS = 512


class ExpertWeights(NamedTuple):
    """Weights of some experts, layer by layer, out x in as ``torch.nn.Linear`` keeps them."""

    gate_up_EGH: Tensor  # noqa: N815 - shape suffix
    down_EHI: Tensor  # noqa: N815 - shape suffix
    gate_up_bias_EG: Tensor | None = None  # noqa: N815 - shape suffix
    down_bias_EH: Tensor | None = None  # noqa: N815 - shape suffix


@dataclass(frozen=True)
class ExpertMath:
    """The expert function of one layer on this rank: its own experts, then its guests."""

    gate: Gate
    plan: DispatchPlan
    own: ExpertWeights
    guest: ExpertWeights | None

    def up(self, chunk: int, x_RH: Tensor) -> Tensor:
        """Gate and up values ``[R, G]``."""
        return self._matmul(chunk, x_RH, 0, transposed=False)

    def down(self, chunk: int, h_RI: Tensor) -> Tensor:
        """Expert outputs ``[R, H]``, unweighted."""
        return self._matmul(chunk, h_RI, 1, transposed=False)

    def up_gradient(self, chunk: int, d_RG: Tensor) -> Tensor:
        """Gradient of the rows that came in, ``[R, H]``."""
        return self._matmul(chunk, d_RG, 0, transposed=True)

    def down_gradient(self, chunk: int, dy_RH: Tensor) -> Tensor:
        """``dY W₂``, ``[R, I]``: the gradient of h before the router weight."""
        return self._matmul(chunk, dy_RH, 1, transposed=True)

    def add_bias_dots_(self, chunk: int, dy_RH: Tensor, dots_R: Tensor) -> None:
        """Add ``<dY, b₂>``, the part of the router-weight gradient that the down bias brings."""
        if self.own.down_bias_EH is None or hollow(dy_RH):
            return
        for slot, rows in self.plan.slot_slices[chunk]:
            bias_H = self._slot(3, slot)
            assert bias_H is not None
            for block in _blocks(rows):
                dots_R[block] += (dy_RH[block].to(dots_R.dtype) * bias_H.to(dots_R.dtype)).sum(1)

    def _slot(self, which: int, slot: int) -> Tensor | None:
        local = self.plan.local_experts
        source = self.own if slot < local else self.guest
        assert source is not None
        weight = source[which]
        return None if weight is None else weight[slot if slot < local else slot - local]

    def _matmul(self, chunk: int, x_RX: Tensor, layer: int, *, transposed: bool) -> Tensor:
        weights_EOX, bias_EO = self.own[layer], self.own[layer + 2]
        assert weights_EOX is not None
        columns = weights_EOX.shape[2] if transposed else weights_EOX.shape[1]
        biased = bias_EO is not None and not transposed
        if not biased and self._grouped(x_RX, weights_EOX):
            weight = weights_EOX if transposed else weights_EOX.transpose(1, 2)
            return grouped_mm(x_RX, weight, offs=self.plan.slot_ends_CS[chunk])
        out_RO = x_RX.new_empty(x_RX.shape[0], columns)
        if hollow(x_RX):
            return out_RO
        for slot, rows in self.plan.slot_slices[chunk]:
            weight_OX = self._slot(layer, slot)
            assert weight_OX is not None
            right = weight_OX if transposed else weight_OX.t()
            if biased:
                bias_O = self._slot(layer + 2, slot)
                assert bias_O is not None
                torch.addmm(bias_O, x_RX[rows], right, out=out_RO[rows])
            else:
                torch.mm(x_RX[rows], right, out=out_RO[rows])
        return out_RO

    def _grouped(self, x_RX: Tensor, weights_EOX: Tensor) -> bool:
        return (
            x_RX.is_cuda
            and x_RX.dtype == torch.bfloat16
            and self.plan.guests == 0
            and 0 < x_RX.shape[0] < GROUPED_BELOW_ROWS * self.plan.local_experts
            # The rows of all three operands have to start on 16 bytes.
            and all(width % 8 == 0 for width in weights_EOX.shape[1:])
            and weights_EOX.is_contiguous()
            and weights_EOX.storage_offset() % 8 == 0
        )


class GradientAccumulators:
    """One wide accumulator per expert weight, over all chunks; guests' return to their owners at the end.

    A weight gradient that is a single product (one chunk, nothing migrated from or to this rank) needs no sum: the
    matmul rounds it once, into the weight's dtype.

    Args:
        math: The layer's experts.
        wanted: Which of the four weights need a gradient, equal on all ranks; the others get no accumulator.
    """

    def __init__(self, math: ExpertMath, wanted: Sequence[bool] = (True,) * 4) -> None:
        self._plan = math.plan
        self._single = math.plan.one_product
        chosen = [w if need else None for w, need in zip(math.own, wanted, strict=True)]
        narrow = chosen[:2] if self._single else []
        self._own = [*map(self._empty_like, narrow), *map(_zeros_like, chosen[len(narrow) :])]
        self._guest: list[Tensor | None] | None = None
        if math.guest is not None:
            guests = zip(math.guest, wanted, strict=True)
            self._guest = [_zeros_like(w) if need else None for w, need in guests]

    def _empty_like(self, weight: Tensor | None) -> Tensor | None:
        """To be written, not added to; experts without rows get their zeros here."""
        if weight is None:
            return None
        out = torch.empty_like(weight, memory_format=torch.contiguous_format)
        for slot, rows in enumerate(self._plan.slot_rows[0]):
            if rows == 0:
                out[slot].zero_()
        return out

    def add_down(self, chunk: int, dy_RH: Tensor, weighted_h_RI: Tensor, weights_R: Tensor) -> None:
        """``dYᵀ (w·h)`` and, with a bias, ``Σ w·dY``."""
        if hollow(dy_RH):
            return
        for slot, rows in self._plan.slot_slices[chunk]:
            weight_HI, bias_H = self._slot(1, slot), self._slot(3, slot)
            if weight_HI is not None:
                self._add(weight_HI, dy_RH[rows], weighted_h_RI[rows])
            if bias_H is not None:
                for block in _blocks(rows):
                    bias_H.addmv_(dy_RH[block].to(bias_H.dtype).t(), weights_R[block].to(bias_H.dtype))

    def add_up(self, chunk: int, d_RG: Tensor, x_RH: Tensor) -> None:
        """``dᵀ x`` and, with a bias, ``Σ d``."""
        if hollow(d_RG):
            return
        for slot, rows in self._plan.slot_slices[chunk]:
            weight_GH, bias_G = self._slot(0, slot), self._slot(2, slot)
            if weight_GH is not None:
                self._add(weight_GH, d_RG[rows], x_RH[rows])
            if bias_G is not None:
                bias_G += d_RG[rows].sum(0, dtype=bias_G.dtype)

    def _add(self, total_OX: Tensor, left_RO: Tensor, right_RX: Tensor) -> None:
        if self._single:
            _set_product(total_OX, left_RO, right_RX)
        else:
            _add_product(total_OX, left_RO, right_RX)

    def finish(self, ranks: Ranks, dtype: torch.dtype) -> list[Tensor | None]:
        """Bring guests' gradients home and give up the accumulators, in the weights' dtype. A collective."""
        grads: list[Tensor | None] = []
        for which in range(len(self._own)):
            own, self._own[which] = self._own[which], None
            if own is not None and self._plan.migration is not None:
                assert self._guest is not None
                guest, self._guest[which] = self._guest[which], None
                assert guest is not None
                return_home(self._plan, ranks, own, guest)
                del guest
            grads.append(None if own is None else own.to(dtype))
            del own
        return grads

    def _slot(self, which: int, slot: int) -> Tensor | None:
        local = self._plan.local_experts
        own = slot < local
        source = self._own if own else self._guest
        assert source is not None
        weight = source[which]
        return None if weight is None else weight[slot if own else slot - local]


def fetch_guests(plan: DispatchPlan, ranks: Ranks, own: ExpertWeights) -> ExpertWeights | None:
    """The weights of this rank's guests. A collective when the plan migrates anything, on every rank."""
    if plan.migration is None:
        return None
    return ExpertWeights(*(None if w is None else fetch_weight(plan, ranks, w) for w in own))  # type: ignore[arg-type]


def fetch_weight(plan: DispatchPlan, ranks: Ranks, weight: Tensor) -> Tensor:
    """One weight tensor of the guests, ``[guests, …]``."""
    assert plan.migration is not None
    sends = [e for row in plan.migration.send_experts for e in row]
    source = torch.stack([weight[e] for e in sends]) if sends else weight.new_empty(0, *weight.shape[1:])
    output = weight.new_empty(plan.guests, *weight.shape[1:])
    counts = [len(row) for row in plan.migration.send_experts]
    ranks.all_to_all(output, source, plan.migration.receive_counts, counts).wait()
    return output


def return_home(plan: DispatchPlan, ranks: Ranks, own: Tensor, guest: Tensor) -> None:
    """Add guests' gradients to their owners' ``own``. A collective."""
    assert plan.migration is not None
    sends = [e for row in plan.migration.send_experts for e in row]
    received = own.new_empty(len(sends), *own.shape[1:])
    counts = [len(row) for row in plan.migration.send_experts]
    ranks.all_to_all(received, guest, counts, plan.migration.receive_counts).wait()
    for i, expert in enumerate(sends):  # by rank of the guest, so that two runs add alike
        own[expert] += received[i]


def _zeros_like(weight: Tensor | None) -> Tensor | None:
    if weight is None:
        return None
    return torch.zeros(weight.shape, dtype=accumulation_dtype(weight.dtype), device=weight.device)


def _blocks(rows: slice) -> list[slice]:
    return [
        slice(s, min(s + _ACCUMULATE_ROWS, rows.stop)) for s in range(rows.start, rows.stop, _ACCUMULATE_ROWS)
    ]


def _set_product(out_OX: Tensor, left_RO: Tensor, right_RX: Tensor) -> None:
    """``out = leftᵀ right``, rounded once."""
    if left_RO.is_cuda or accumulation_dtype(left_RO.dtype) == left_RO.dtype:
        torch.mm(left_RO.t(), right_RX, out=out_OX)
        return
    wide_OX = torch.zeros(out_OX.shape, dtype=accumulation_dtype(out_OX.dtype))
    _add_product(wide_OX, left_RO, right_RX)
    out_OX.copy_(wide_OX)


def _add_product(total_OX: Tensor, left_RO: Tensor, right_RX: Tensor) -> None:
    """``total += leftᵀ right``, summed in the dtype of ``total``."""
    if left_RO.dtype == total_OX.dtype:
        total_OX.addmm_(left_RO.t(), right_RX)
    elif not left_RO.is_cuda:
        for block in _blocks(slice(0, left_RO.shape[0])):
            total_OX.addmm_(left_RO[block].t().to(total_OX.dtype), right_RX[block].to(total_OX.dtype))
    elif _accumulates_wide(left_RO.device, left_RO.dtype):
        torch.addmm(total_OX, left_RO.t(), right_RX, out_dtype=total_OX.dtype, out=total_OX)
    else:
        total_OX += left_RO.t() @ right_RX


@cache
def _accumulates_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build's matmul adds 16-bit products into a float32 matrix in place (asked once)."""
    left = torch.full((16, 16), 0.5, device=device, dtype=dtype)
    total = torch.full((16, 16), 1.0, device=device)
    try:
        torch.addmm(total, left.t(), left, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return bool((total == 5.0).all())
