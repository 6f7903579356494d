"""The stack that benchmarks/checkpoint_offload.py runs: layers of gpt-oss-20b as checkpointed segments.

Shapes: N tokens, H hidden, Q = query heads·64, I = width of the k experts a token takes.
A layer is two segments, attention and experts, each checkpointed: 24 layers have 2·24-1 = 47 boundaries that
wait for backward, since the last segment is not checkpointed (its backward would begin at once).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from operators.checkpoint_offload_gain import Phase, PhaseKind
from operators.dry_run import PeakTracker


@dataclass(frozen=True, slots=True)
class Shape:
    tokens: int
    hidden: int
    heads: int
    kv_heads: int
    head_width: int
    intermediate: int
    layers: int
    sequence: int
    dtype: torch.dtype
    device: torch.device

    @property
    def boundaries(self) -> int:
        return 2 * self.layers - 1


GPT_OSS_20B = {"tokens": 69_632, "hidden": 2880, "heads": 64, "kv_heads": 8, "head_width": 64}
GPT_OSS_20B |= {"intermediate": 4 * 2880, "layers": 24, "sequence": 8704}
TINY = {"tokens": 512, "hidden": 64, "heads": 4, "kv_heads": 2, "head_width": 16}
TINY |= {"intermediate": 128, "layers": 3, "sequence": 128}


class Attention(nn.Module):
    """Grouped-query attention over sequences of equal length, causal, with its norm and residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, kv = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        self.norm = nn.RMSNorm(shape.hidden)
        self.qkv = nn.Linear(shape.hidden, width + 2 * kv)
        self.out = nn.Linear(width, shape.hidden)

    def forward(self, x_NH: Tensor) -> Tensor:
        s = self.shape
        heads = self.qkv(self.norm(x_NH)).view(-1, s.sequence, s.heads + 2 * s.kv_heads, s.head_width)
        q, k, v = heads.transpose(1, 2).split([s.heads, s.kv_heads, s.kv_heads], dim=1)
        # the one kernel for long sequences that has a deterministic backward
        kernel = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if x_NH.is_cuda else nullcontext()
        with kernel:
            o = scaled_dot_product_attention(q, self._per_query(k), self._per_query(v), is_causal=True)
        y_NH: Tensor = self.out(o.transpose(1, 2).reshape(len(x_NH), -1))
        return x_NH + y_NH

    def _per_query(self, x: Tensor) -> Tensor:
        group = self.shape.heads // self.shape.kv_heads
        return x.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(1, 2)


class Experts(nn.Module):
    """The work of a token's k experts as one gated MLP, with its norm and residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.hidden)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x_NH: Tensor) -> Tensor:
        gate_NI, up_NI = self.gate_up(self.norm(x_NH)).chunk(2, dim=-1)
        y_NH: Tensor = self.down(silu(gate_NI) * up_NI)
        return x_NH + y_NH


class Meter:
    """Peak bytes of every phase: of the CUDA allocator, or tracked on the CPU."""

    def __init__(self, device: torch.device, tracker: PeakTracker | None) -> None:
        self._device, self._tracker = device, tracker
        self.phases: list[Phase] = []
        self._now: tuple[PhaseKind, int] | None = None

    def enter(self, kind: PhaseKind, block: int = 0) -> None:
        """The phase before ends here. The allocator counts on the host, so nothing waits."""
        self.leave()
        self._now = (kind, block)

    def leave(self) -> None:
        if self._tracker is not None:
            peak = self._tracker.peak_bytes
            self._tracker.reset_peak()
        else:
            peak = torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        if self._now is not None:
            self.phases.append(Phase(self._now[0], peak, self._now[1]))
        self._now = None

    @property
    def peak_bytes(self) -> int:
        return max(phase.peak_bytes for phase in self.phases)


class _Enter(Protocol):
    def __call__(self, kind: PhaseKind, block: int = 0) -> None: ...


class Stack(nn.Module):
    """The segments in order; ``enter``, if set, hears of every forward and every recompute."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kinds = (Attention, Experts)
        with shape.device:
            self.segments = nn.ModuleList([kinds[i % 2](shape) for i in range(2 * shape.layers)])
            self.embed = nn.Parameter(torch.ones(shape.hidden))
        self.to(shape.dtype)
        self.enter: _Enter | None = None
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            parameter.grad = torch.zeros_like(parameter)

    def forward(self, tokens_NH: Tensor) -> Tensor:
        x_NH = tokens_NH * self.embed
        for i, segment in enumerate(self.segments):
            if i < self.shape.boundaries:
                x_NH = checkpoint(self._run, i, x_NH, use_reentrant=False)
            else:
                self._note("head")
                x_NH = segment(x_NH)
        return x_NH.square().mean()

    def _run(self, i: int, x_NH: Tensor) -> Tensor:
        self._note("forward" if torch._C._current_graph_task_id() == -1 else "backward", i)
        y_NH: Tensor = self.segments[i](x_NH)
        return y_NH

    def _note(self, kind: PhaseKind, block: int = 0) -> None:
        if self.enter is not None:
            self.enter(kind, block)
