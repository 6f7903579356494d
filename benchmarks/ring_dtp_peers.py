"""What a head is compared with: its GEMMs alone, torch's heads, and other projects' if they are installed.

Each peer is a function of (hidden, whole weight, targets) to a loss; all ranks' vocabulary on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from operators.head_baselines import has_torch_chunked_head, materialised_head, torch_chunked_head

Head = Callable[[Tensor, Tensor, Tensor], Tensor]


def peers() -> dict[str, Head]:
    """The heads that can run here, by provider name."""
    found: dict[str, Head] = {"materialised": materialised_head}
    if has_torch_chunked_head():
        found["torch_chunked"] = torch_chunked_head
    try:
        liger = import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss
    except (ImportError, AttributeError):
        pass
    else:
        exact, plain = liger(accum_dtype=torch.float32), liger()
        found["liger_fp32"] = lambda x, w, t: exact(w, x, t)
        found["liger"] = lambda x, w, t: plain(w, x, t)
    try:
        cut = import_module("cut_cross_entropy").linear_cross_entropy
    except (ImportError, AttributeError):
        pass
    else:
        found["cut_cross_entropy"] = cut
        found["cut_cross_entropy_exact"] = lambda x, w, t: cut(x, w, t, impl="cce_exact")
    return found


class Gemms:
    """The matrix products of a ring of P rounds and nothing else: outputs in the inputs' dtype, no tiles."""

    def __init__(
        self, hidden_NH: Tensor, weight_VH: Tensor, rounds: int, *, logits_twice: bool = True
    ) -> None:
        self._x, self._w, self._rounds, self._twice = hidden_NH, weight_VH, rounds, logits_twice
        self._y = hidden_NH.new_empty(hidden_NH.shape[0], weight_VH.shape[0])
        torch.mm(hidden_NH, weight_VH.t(), out=self._y)
        self._dx, self._dw = torch.empty_like(hidden_NH), torch.empty_like(weight_VH)

    def forward(self) -> None:
        """One product a round."""
        for _ in range(self._rounds):
            torch.mm(self._x, self._w.t(), out=self._y)

    def forward_backward(self) -> None:
        """Four products a round (three if logits are evaluated once)."""
        for _ in range(self._rounds):
            torch.mm(self._x, self._w.t(), out=self._y)
            if self._twice:
                torch.mm(self._x, self._w.t(), out=self._y)
            torch.mm(self._y, self._w, out=self._dx)
            torch.mm(self._y.t(), self._x, out=self._dw)
