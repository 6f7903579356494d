"""The bound against what a dry run of the operator really holds, at full size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from operators.bounds.pipelined_llep import pipelined_llep_terms
from operators.dispatch_launch import DispatchLaunch, DispatchSchedule
from operators.dispatch_plan import DispatchPlan, gathered_counts, make_plan
from operators.dry_run import PeakTracker, fake_tensors, hollow
from operators.expert_mlp import ExpertWeights
from operators.least_loaded import plan_least_loaded
from operators.pipelined_llep import pipelined_llep
from operators.ranks import LoopbackRanks
from operators.routing import Routing, profile

GIB = 2**30
PROFILES = ["balanced", "skew:80/16", "random", "one_hot", "rank_dependent", "drifting", "ties"]


@dataclass(frozen=True)
class Shape:
    tokens: int = 65_536
    hidden: int = 7168
    intermediate: int = 2048
    experts: int = 128
    top_k: int = 8
    ranks: int = 8
    rank: int = 0
    chunks: int = 8
    schedule: DispatchSchedule = "serial"
    profile: str = "balanced"
    migrate: bool = True

    @property
    def launch(self) -> DispatchLaunch:
        return DispatchLaunch.for_chunks(
            self.chunks, self.tokens, dispatch_schedule=self.schedule, migrate=self.migrate
        )

    def plan(self) -> DispatchPlan:
        routing = profile(self.profile, self.tokens, self.experts, self.top_k, self.rank, ranks=self.ranks)
        return make_plan(routing, LoopbackRanks(self.ranks, self.rank), self.launch)

    def weights_bytes(self) -> int:
        """Expert weights of the rank; their gradients take the same."""
        return self.experts // self.ranks * 3 * self.hidden * self.intermediate * 2

    def bound(self, pass_: str, plan: DispatchPlan | None = None) -> int:
        """Guarantee, or, given a plan, the bound of what that plan receives and migrates."""
        sent = sum(len(row) for row in plan.migration.send_experts) if plan and plan.migration else 0
        terms = pipelined_llep_terms(
            tokens=self.tokens,
            hidden=self.hidden,
            intermediate=self.intermediate,
            experts=self.experts,
            top_k=self.top_k,
            expert_ranks=self.ranks,
            chunks=self.chunks,
            schedule=self.schedule,
            pass_=pass_,
            rows_per_chunk=plan.received_most if plan else None,
            migrated_experts=plan.guests if plan else 0,
            sent_experts=sent,
        )
        return sum(terms.values())


@dataclass
class Peaks:
    forward: int
    backward: int
    """With the expert weights' gradients, where they exist at the peak; without the weights themselves."""
    resting: int
    """Alive between the passes."""


def dry(shape: Shape, plan: DispatchPlan, layers: int = 1) -> Peaks:
    """Peaks of one layer, or of a stack of layers each inside a non-reentrant checkpoint."""
    ranks = LoopbackRanks(shape.ranks, shape.rank)
    local = shape.experts // shape.ranks
    with fake_tensors(), PeakTracker() as tracker:
        weights = [
            ExpertWeights(
                torch.empty(
                    local, 2 * shape.intermediate, shape.hidden, dtype=torch.bfloat16
                ).requires_grad_(),
                torch.empty(local, shape.hidden, shape.intermediate, dtype=torch.bfloat16).requires_grad_(),
            )
            for _ in range(layers)
        ]
        scores = torch.empty(shape.tokens, shape.experts, dtype=torch.bfloat16).requires_grad_()
        routing = Routing(torch.empty(shape.tokens, shape.top_k, dtype=torch.int64), shape.experts)
        before = tracker.live_bytes
        x = torch.empty(shape.tokens, shape.hidden, dtype=torch.bfloat16).requires_grad_()
        fake_plan = plan.map_tensors(hollow)

        def block(h: Tensor, up: Tensor, down: Tensor) -> Tensor:
            return pipelined_llep(
                h,
                scores,
                routing,
                ExpertWeights(up, down),
                ranks=ranks,
                launch=shape.launch,
                plan=fake_plan,
            )

        tracker.reset_peak()
        y = x
        for w in weights:
            y = block(y, w[0], w[1]) if layers == 1 else _checkpointed(block, y, w[0], w[1])
        forward, resting = tracker.peak_bytes - before, tracker.live_bytes - before
        tracker.reset_peak()
        y.backward(torch.empty_like(y))
        return Peaks(forward, tracker.peak_bytes - before, resting)


def _checkpointed(block: Callable[..., Tensor], *args: Any) -> Tensor:
    out: Tensor = checkpoint(block, *args, use_reentrant=False, preserve_rng_state=False)
    return out


@pytest.mark.parametrize("schedule", ["serial", "prefetch", "overlap"])
@pytest.mark.parametrize("name", PROFILES)
def test_bound_holds_for_every_profile(name: str, schedule: DispatchSchedule) -> None:
    shape = Shape(profile=name, schedule=schedule, tokens=4096, hidden=2048, experts=32)
    for chunks, rank in ((1, 0), (4, 0), (4, 1)):
        one = replace(shape, rank=rank, chunks=chunks)
        plan = one.plan()
        peaks = dry(one, plan)
        assert peaks.forward <= one.bound("forward", plan)
        # Gradients in the weights' dtype appear when the accumulators end, beside no chunk buffers.
        assert peaks.backward <= one.bound("backward", plan)


@cache
def worst_at_full_size(name: str) -> tuple[Shape, DispatchPlan]:
    """The rank with most guests, then most rows; a plan does not depend on the schedule.

    Routers that differ between ranks are played with everybody's counts.
    """
    shape = Shape(profile=name)
    routings = [
        profile(name, shape.tokens, shape.experts, shape.top_k, r, ranks=shape.ranks)
        for r in range(shape.ranks)
    ]
    counts = gathered_counts(routings, shape.launch)
    routes = counts[:, : shape.launch.max_chunks * shape.experts]  # what follows is what ranks state
    loads = routes.view(shape.ranks, -1, shape.experts).sum((0, 1)).tolist()
    least = plan_least_loaded(loads, shape.ranks)
    rank = max(range(shape.ranks), key=lambda r: (len(least.guests(r)), least.rank_rows()[r]))
    plan = make_plan(routings[rank], LoopbackRanks(shape.ranks, rank, gathered=[counts]), shape.launch)
    assert plan.least_loaded == least
    return replace(shape, rank=rank), plan


@pytest.mark.parametrize("schedule", ["serial", "prefetch", "overlap"])
@pytest.mark.parametrize("name", PROFILES)
def test_bound_holds_at_full_size_on_the_worst_rank(name: str, schedule: DispatchSchedule) -> None:
    shape, plan = worst_at_full_size(name)
    shape = replace(shape, schedule=schedule)
    peaks = dry(shape, plan)
    assert peaks.forward <= shape.bound("forward", plan)
    assert peaks.backward <= shape.bound("backward", plan) <= 1.1 * peaks.backward
    if plan.migration is None:
        assert shape.bound("backward", plan) <= shape.bound("backward")


@pytest.mark.parametrize("schedule", ["serial", "prefetch", "overlap"])
@pytest.mark.parametrize("chunks", [1, 8])
def test_guarantee_is_tight_for_the_worst_router(chunks: int, schedule: DispatchSchedule) -> None:
    shape = Shape(profile="one_hot", chunks=chunks, schedule=schedule, migrate=False)
    peaks = dry(shape, shape.plan())
    for pass_, peak in (("forward", peaks.forward), ("backward", peaks.backward)):
        assert peak <= shape.bound(pass_) <= 1.05 * peak


@pytest.mark.parametrize(
    ("shape", "most_gib"),
    [
        (Shape(chunks=8), 11.0),
        (Shape(chunks=16), 9.5),
        (Shape(chunks=8, schedule="prefetch"), 12.8),
        (Shape(chunks=16, schedule="prefetch"), 10.4),
        *[(Shape(chunks=8, profile="skew:80/16", rank=r), 12.5) for r in (0, 1, 7)],
    ],
)
def test_peak_of_the_reference_layer(shape: Shape, most_gib: float) -> None:
    """65,536 tokens, H = 7168, I = 2048, 16 of 128 experts, top-8, bf16; everything counted."""
    assert (dry(shape, shape.plan()).backward + shape.weights_bytes()) / GIB <= most_gib


def test_ten_chunks_take_seventy_percent_off() -> None:
    at_once, ten = (Shape(tokens=131_072, chunks=k) for k in (1, 10))
    peaks = [dry(s, s.plan()).backward + s.weights_bytes() for s in (at_once, ten)]
    assert peaks[1] <= 0.3 * peaks[0]


@pytest.mark.parametrize("name", PROFILES)
def test_bound_holds_inside_a_checkpoint_of_six_layers(name: str) -> None:
    shape, plan = worst_at_full_size(name)
    layers = 6
    stack = dry(shape, plan, layers)
    boundary = shape.tokens * shape.hidden * 2
    scores = shape.tokens * shape.experts * 2  # the sum of their gradients over the layers, and the next one
    kept = (layers - 1) * (boundary + shape.weights_bytes()) + 2 * scores  # layer inputs, gradients done
    assert stack.backward <= shape.bound("backward", plan) + kept


def test_nothing_but_inputs_rests_between_the_passes() -> None:
    """Live bytes after forward grow by the layer input alone, whatever K: no derived weights, no rows."""
    shape = Shape(tokens=4096, experts=32, chunks=4, migrate=False)
    plan = shape.plan()
    two, six = dry(shape, plan, 2), dry(shape, plan, 6)
    boundary = shape.tokens * shape.hidden * 2
    assert six.resting - two.resting == 4 * boundary
