"""The routing record: profiles, replay inside a checkpoint, loopback ranks that differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from operators.dispatch_launch import DispatchLaunch
from operators.dispatch_plan import gathered_counts, make_plan
from operators.errors import RuleError
from operators.kernels.swiglu import SWIGLU
from operators.pipelined_llep import PipelinedLLEP
from operators.ranks import LoopbackRanks, ProcessRanks
from operators.routing import Routing, profile, replay_routing, route
from tests.gang import gang
from tests.operators.dense_moe import dense, draw

NAMES = ["balanced", "skew:80/4", "random", "one_hot", "rank_dependent", "drifting", "ties"]


@pytest.mark.parametrize("name", NAMES)
def test_profiles_pick_distinct_experts_and_are_reproducible(name: str) -> None:
    first, again = (profile(name, 40, 16, 4, rank=1, ranks=2, step=3) for _ in range(2))
    assert torch.equal(first.ids_NK, again.ids_NK)
    assert first.ids_NK.min() >= 0
    assert first.ids_NK.max() < 16
    assert all(len(set(row)) == 4 for row in first.ids_NK.tolist())


def test_skew_sends_its_share_to_the_first_experts() -> None:
    ids = profile("skew:80/4", 50, 16, 4).ids_NK
    assert bool((ids[:40] < 4).all())
    assert bool((ids[40:] >= 4).all())


@pytest.mark.parametrize("name", ["nonsense", "skew:80", "skew:120/4", "skew:80/16"])
def test_unknown_profiles_are_refused(name: str) -> None:
    with pytest.raises(RuleError):
        profile(name, 4, 16, 2)


class FickleRouter:
    """Every score equal; each call breaks the tie another way."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, scores_NE: Tensor, top_k: int) -> Tensor:
        self.calls += 1
        row = torch.arange(top_k) + (self.calls % 2) * (scores_NE.shape[1] - top_k)
        return row.expand(scores_NE.shape[0], top_k).clone()


def _two_checkpointed_layers(ranks: ProcessRanks) -> float:
    """Error of hidden gradients and outputs when the router would choose otherwise in the recompute."""
    routings = [Routing(FickleRouter()(torch.zeros(n, 8), 3), 8) for n in (9, 0, 5, 2)]
    drawn = draw(routings, 6, 5, bias=False, dtype=torch.float64)
    want = dense(drawn, SWIGLU)
    layer = PipelinedLLEP(
        6,
        5,
        8,
        ranks=ranks,
        launch=DispatchLaunch(chunk_tokens=4, lambda_=1.1, min_rows=1),
        dtype=torch.float64,
    )
    own = drawn.local(ranks.rank, ranks.size)
    with torch.no_grad():
        layer.gate_up.copy_(own.gate_up_EGH)
        layer.down.copy_(own.down_EHI)
    x = drawn.hidden[ranks.rank].clone().requires_grad_()
    scores = drawn.scores[ranks.rank].clone().requires_grad_()
    router = FickleRouter()

    def block(h: Tensor, s: Tensor) -> Any:
        return layer(h, s, route(s, 3, router))

    y = checkpoint(block, x, scores, use_reentrant=False, context_fn=replay_routing)
    second = checkpoint(block, y, scores, use_reentrant=False, context_fn=replay_routing)
    (second * 0).sum().backward(retain_graph=True)  # a second layer behind it, in order on all ranks
    for leaf in (x, scores):
        leaf.grad = None
    y.backward(drawn.grads[ranks.rank])
    assert router.calls == 2, "recompute asked the router again"
    assert x.grad is not None
    assert scores.grad is not None
    pairs = [(y.detach(), want.outputs), (x.grad, want.d_hidden), (scores.grad, want.d_scores)]
    return max((float((a - b[ranks.rank]).abs().max()) for a, b in pairs if a.numel()), default=0.0)


def test_recompute_replays_the_record_where_the_router_breaks_ties_otherwise() -> None:
    assert max(gang(4).run(_two_checkpointed_layers)) < 1e-10


def _splits(ranks: ProcessRanks, tokens: list[int], launch: DispatchLaunch) -> Any:
    routing = profile("rank_dependent", tokens[ranks.rank], 8, 2, ranks.rank, ranks=4)
    plan = make_plan(routing, ranks, launch)
    return plan.send_splits, plan.receive_splits, plan.slots


def test_loopback_of_a_rank_has_the_sizes_of_the_real_group() -> None:
    tokens, launch = [20, 7, 0, 12], DispatchLaunch(chunk_tokens=6, max_chunks=5, min_rows=2, lambda_=1.05)
    real = gang(4).run(_splits, tokens, launch)
    routings = [profile("rank_dependent", n, 8, 2, r, ranks=4) for r, n in enumerate(tokens)]
    gathered = gathered_counts(routings, launch)
    for rank, routing in enumerate(routings):
        loopback = LoopbackRanks(4, rank, gathered=[gathered], largest=max(tokens))
        plan = make_plan(routing, loopback, launch)
        assert (plan.send_splits, plan.receive_splits, plan.slots) == real[rank]
