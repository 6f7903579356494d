"""What the curves of PipelinedLLEP are drawn from: latency and peak against K, by tokens and by router.

The rank measured is the one whose memory bound is largest. Beside ours stand the chunk counts that other systems
would choose: a fixed K, and the count that hides most transfer, whatever it costs in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from operators.bounds.pipelined_llep import pipelined_llep_terms
from operators.dispatch_launch import DispatchLaunch
from operators.dispatch_plan import make_plan
from operators.expert_baselines import bandwidth_optimal_chunks, fixed_chunks
from operators.ranks import LoopbackRanks
from operators.routing import Routing, profile

PROFILES = ("balanced", "skew:80/16", "random")
CHUNKS = {128: (1, 2, 4), 1024: (1, 2, 4, 8), 8192: (1, 2, 4, 8, 16), 65_536: (1, 2, 4, 8, 16, 32)}
LONGEST = {131_072: (1, 4, 10, 16, 32)}
FIXED = 4  # what a fixed-K system uses without tuning
ROUTES_HOME = 5  # exchanges of all rows in a training step: x and y forward; dY, x and dx backward


@dataclass(frozen=True)
class Shape:
    """One layer; the reference is 16 of 128 experts on each of 8 ranks."""

    tokens: int = 65_536
    hidden: int = 7168
    intermediate: int = 2048
    experts: int = 128
    top_k: int = 8
    ranks: int = 8
    profile: str = "balanced"

    def routing(self, rank: int, device: torch.device) -> Routing:
        """The picks of one rank's tokens."""
        return profile(
            self.profile, self.tokens, self.experts, self.top_k, rank, ranks=self.ranks, device=device
        )


@dataclass(frozen=True)
class Variant:
    """One thing to measure."""

    provider: str
    chunks: int = 1
    schedule: str = "serial"
    rank: int = 0
    shape: Shape = field(default_factory=Shape)
    repeats: int = 5

    @property
    def label(self) -> str:
        return (
            f"{self.provider:16} K={self.chunks:<3} {self.schedule:8} N={self.shape.tokens:<7}"
            f"{self.shape.profile:11} rank {self.rank}"
        )


def curves(shape: Shape, device: torch.device, policies: Iterable[int] = ()) -> list[Variant]:
    """The grid, longest tokens last; token counts beyond ``shape.tokens`` only at the reference's size."""
    grid = {n: ks for n, ks in {**CHUNKS, **LONGEST}.items() if n <= 2 * shape.tokens}
    out = []
    for tokens, chunk_counts in grid.items():
        repeats = 10 if tokens <= 1024 else 5 if tokens <= 8192 else 2
        for name in PROFILES if tokens <= 65_536 else PROFILES[:2]:
            at = replace(shape, tokens=tokens, profile=name)
            rank = worst_rank(at, chunk_counts[-1], device) if name.startswith("skew") else 0
            wanted = sorted({*chunk_counts, *(policies if tokens == shape.tokens else ())})
            out += [Variant("flatpeak", k, "serial", rank, at, repeats) for k in wanted]
            if name == "balanced" and 1024 < tokens <= 65_536:
                out += [
                    Variant("flatpeak", k, "prefetch", rank, at, repeats) for k in wanted if k in {2, 8, 16}
                ]
            out += [
                Variant(p, 1, "serial", rank, at, repeats)
                for p in ("llep", "llep_recompute")
                if tokens <= 65_536 or name == "balanced"
            ]
    return out


def worst_rank(shape: Shape, chunks: int, device: torch.device) -> int:
    """The rank whose plan has the largest bound in backward, for a router that is equal on all ranks."""
    launch = DispatchLaunch.for_chunks(chunks, shape.tokens)
    bytes_by_rank = []
    for rank in range(shape.ranks):
        plan = make_plan(shape.routing(rank, device), LoopbackRanks(shape.ranks, rank), launch)
        sends = sum(len(row) for row in plan.migration.send_experts) if plan.migration else 0
        terms = pipelined_llep_terms(
            tokens=shape.tokens,
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            experts=shape.experts,
            top_k=shape.top_k,
            expert_ranks=shape.ranks,
            chunks=chunks,
            schedule="serial",
            pass_="backward",
            rows_per_chunk=plan.received_most,
            migrated_experts=plan.guests,
            sent_experts=sends,
        )
        bytes_by_rank.append(sum(terms.values()))
    return bytes_by_rank.index(max(bytes_by_rank))


def policy_chunks(shape: Shape, *, link_bytes_s: float, alpha_s: float, flops: float) -> dict[str, int]:
    """K by the policies of other systems, for one training step of the layer.

    Args:
        shape: The layer.
        link_bytes_s: What one rank sends a second.
        alpha_s: Start-up of one chunk.
        flops: Rate of the expert matmuls, FLOP/s.
    """
    rows = shape.tokens * shape.top_k
    leaves = rows * (shape.ranks - 1) / max(shape.ranks, 1)
    transfer_s = ROUTES_HOME * leaves * shape.hidden * 2 / link_bytes_s
    compute_s = 11 * 2 * rows * shape.hidden * shape.intermediate / flops
    return {
        f"fixed ({FIXED})": fixed_chunks(shape.tokens, FIXED),
        "bandwidth-optimal": bandwidth_optimal_chunks(
            shape.tokens, alpha_s=alpha_s, transfer_s=transfer_s, compute_s=compute_s
        ),
    }


def floor_by_rows(
    shape: Shape, time: Callable[[Callable[[], None]], float], device: torch.device
) -> list[str]:
    """Grouped against dense matmuls of the first layer as the rows of an expert fall."""
    local = shape.experts // shape.ranks
    weight = torch.randn(local, 2 * shape.intermediate, shape.hidden, device=device, dtype=torch.bfloat16)
    lines = []
    for step in (32, 64, 128, 256, 512, 1024, 2048):
        x = torch.randn(local * step, shape.hidden, device=device, dtype=torch.bfloat16)
        out = x.new_empty(local * step, 2 * shape.intermediate)
        ends = torch.arange(step, local * step + 1, step, device=device, dtype=torch.int32)

        def grouped(x: Tensor = x, ends: Tensor = ends) -> None:
            for _ in range(10):
                grouped_mm(x, weight.transpose(1, 2), offs=ends)

        def dense(x: Tensor = x, out: Tensor = out, step: int = step) -> None:
            for _ in range(10):
                for i in range(local):
                    rows = slice(i * step, (i + 1) * step)
                    torch.mm(x[rows], weight[i].t(), out=out[rows])

        lines.append(
            f"rows   {step:5} an expert, first layer: grouped {100 * time(grouped):7.3f} ms, "
            f"dense {100 * time(dense):7.3f} ms"
        )
    return lines
