"""What one rank gets wrong, or differently, every rank is told before any row moves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from operators.dispatch_launch import BackwardForm, DispatchLaunch
from operators.dispatch_plan import make_plan
from operators.errors import RuleError
from operators.expert_baselines import llep
from operators.expert_mlp import ExpertMath, ExpertWeights
from operators.kernels.swiglu import GPT_OSS, SWIGLU, Gate
from operators.pipelined_llep import PipelinedLLEP, pipelined_llep
from operators.ranks import LoopbackRanks, ProcessRanks
from operators.ring_dtp import RingMode, ring_dtp
from operators.routing import Routing, profile, route
from tests.gang import gang

LAUNCH = DispatchLaunch(chunk_tokens=4, max_chunks=8, min_rows=2)


@dataclass
class Call:
    """One rank's arguments."""

    hidden: Tensor
    scores: Tensor
    routing: Routing
    weights: ExpertWeights
    launch: DispatchLaunch = LAUNCH
    gate: Gate = SWIGLU
    grad: bool = True
    more: dict[str, Any] = field(default_factory=dict)

    def run(self, ranks: Any) -> Tensor:
        with torch.set_grad_enabled(self.grad):
            return pipelined_llep(
                self.hidden,
                self.scores,
                self.routing,
                self.weights,
                ranks=ranks,
                launch=self.launch,
                gate=self.gate,
                **self.more,
            )


def _call(experts: int = 4, local: int = 2, dtype: torch.dtype = torch.float32) -> Call:
    torch.manual_seed(0)
    return Call(
        torch.randn(9, 6, dtype=dtype, requires_grad=True),
        torch.rand(9, experts),
        profile("random", 9, experts, 2),
        ExpertWeights(
            torch.randn(local, 10, 6, dtype=dtype, requires_grad=True),
            torch.randn(local, 6, 5, dtype=dtype, requires_grad=True),
        ),
    )


def _changed(what: str) -> Call:
    call = _call()
    up, down = call.weights[:2]
    match what:
        case "tokens":
            call.hidden = torch.randn(8, 6)
        case "scores":
            call.scores = torch.rand(9, 3)
        case "scores dtype":
            call.scores = call.scores.double()
        case "down shape":
            call.weights = ExpertWeights(up, torch.randn(2, 5, 6))
        case "odd gate_up":
            call.weights = ExpertWeights(torch.randn(2, 11, 6), down)
        case "bias shape":
            call.weights = ExpertWeights(up, down, torch.zeros(2, 1))
        case "down dtype":
            call.weights = ExpertWeights(up, down.bfloat16())
        case "dtype":
            call = _call(dtype=torch.bfloat16)
        case "bias":
            call.weights = ExpertWeights(up, down, torch.zeros(2, 10), torch.zeros(2, 6))
        case "gate":
            call.gate = GPT_OSS
        case "schedule":
            call.launch = replace(LAUNCH, dispatch_schedule="prefetch")
        case "budget":
            call.launch = replace(LAUNCH, chunk_tokens=3)
        case "alpha":
            call.launch = replace(LAUNCH, alpha=1.5)
        case "max_chunks":
            call.launch = replace(LAUNCH, max_chunks=2)
        case "experts":
            call = _call(experts=6, local=3)
        case "no grad":
            call.grad = False
        case "frozen":
            call.weights = ExpertWeights(up.detach(), down)
        case _:
            raise AssertionError(what)
    return call


_REFUSED = {
    "tokens": "hidden is [tokens, hidden]",
    "scores": "scores are [tokens, experts]",
    "scores dtype": "float64 router scores",
    "down shape": "gate_up is [experts/ranks",
    "odd gate_up": "gate_up is [experts/ranks",
    "bias shape": "biases are",
    "down dtype": "one dtype",
    "dtype": "agree on: hidden and intermediate width, dtype",
    "bias": "agree on: hidden and intermediate width, dtype, biases",
    "gate": "biases and gate",
    "schedule": "agree on: dispatch launch knobs",
    "budget": "agree on: dispatch launch knobs",
    "alpha": "agree on: dispatch launch knobs",
    "max_chunks": "number of experts and max_chunks",
    "experts": "number of experts and max_chunks",
    "no grad": "agree on: which gradients are wanted",
    "frozen": "agree on: which gradients are wanted",
}


def _said(ranks: ProcessRanks) -> dict[str, str]:
    said = {}
    for what in _REFUSED:
        call = _changed(what) if ranks.rank == 1 else _call()
        try:
            call.run(ranks)
            said[what] = "nothing"
        except RuleError as error:
            said[what] = error.rule
    _call().run(ranks).sum().backward()  # the group goes on
    return said


def test_one_ranks_wrong_or_different_call_is_refused_by_all() -> None:
    for rank, said in enumerate(gang(2).run(_said)):
        for what, rule in _REFUSED.items():
            assert rule in said[what], (rank, what, said[what])


def test_a_baseline_with_unequal_tokens_agrees() -> None:
    assert gang(2).run(_baseline) == [(3, 6), (8, 6)]


def _baseline(ranks: ProcessRanks) -> tuple[int, ...]:
    call, n = _call(), 3 + 5 * ranks.rank  # its one chunk is as large as a rank's own tokens: no disagreement
    routing = profile("random", n, 4, 2, ranks.rank)
    out = llep(call.hidden[:n], call.scores[:n], routing, call.weights, ranks=ranks, launch=LAUNCH)
    return tuple(out.shape)


@pytest.mark.parametrize(
    "knobs",
    [
        {"alpha": 0.5},
        {"alpha": float("nan")},
        {"alpha": float("inf")},
        {"min_rows": 0},
        {"lambda_": float("nan")},
        {"max_chunks": 0},
    ],
)
def test_knobs_out_of_range_are_refused_where_they_are_set(knobs: dict[str, Any]) -> None:
    with pytest.raises(RuleError):
        DispatchLaunch(chunk_tokens=4, **knobs)


@pytest.mark.parametrize("top_k", [-1, 0, 5])
def test_a_router_picks_between_one_and_all_experts(top_k: int) -> None:
    with pytest.raises(RuleError, match="1 <= top_k <= experts"):
        route(torch.rand(3, 4), top_k)
    with pytest.raises(RuleError, match="at least one expert"):
        Routing(torch.empty(3, 0, dtype=torch.int64), 4)


def test_a_plan_made_for_other_tokens_is_refused() -> None:
    ranks = LoopbackRanks(1)
    call = _call(local=4)
    call.more["plan"] = make_plan(profile("random", 5, 4, 2), ranks, LAUNCH)
    with pytest.raises(RuleError, match="the routing it was made from"):
        call.run(ranks)
    call.more["plan"] = make_plan(call.routing, ranks, LAUNCH)
    call.scores = call.scores[:, :3]
    with pytest.raises(RuleError, match="scores are"):
        call.run(ranks)


@pytest.mark.parametrize("backward", ["chunked", "nested", "llep"])
def test_gradients_of_gradients_are_refused_also_where_upstream_needs_none(backward: str) -> None:
    call = _call(local=4)
    if backward == "llep":
        ranks = LoopbackRanks(1)
        out = llep(call.hidden, call.scores, call.routing, call.weights, ranks=ranks, launch=LAUNCH)
    else:
        form: BackwardForm = "nested" if backward == "nested" else "chunked"
        call.launch = replace(LAUNCH, backward=form)
        out = call.run(LoopbackRanks(1))
    (grad,) = torch.autograd.grad(out.sum(), call.hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="no gradients of gradients"):
        grad.square().sum().backward()


@pytest.mark.parametrize("mode", ["activations", "weights", "gather"])
def test_gradients_of_gradients_of_the_head_are_refused(mode: RingMode) -> None:
    hidden, weight = torch.randn(3, 6, requires_grad=True), torch.randn(5, 6)
    loss = ring_dtp(hidden, weight, torch.tensor([0, 1, 2]), ranks=LoopbackRanks(1), mode=mode)
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="no gradients of gradients"):
        grad.square().sum().backward()


@pytest.mark.parametrize("backward", ["chunked", "nested"])
def test_autocast_does_not_reach_into_the_layer(backward: BackwardForm) -> None:
    layer = PipelinedLLEP(6, 5, 4, ranks=LoopbackRanks(1), launch=replace(LAUNCH, backward=backward))
    found = []
    for enabled in (False, True):
        x = torch.ones(9, 6).cumsum(0).div_(9).requires_grad_()
        scores = torch.linspace(0.1, 0.9, 36).view(9, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            y = layer(x, scores, route(scores, 2))
        y.sum().backward()
        found.append((y.detach(), x.grad))
    (y, grad), (y_cast, grad_cast) = found
    assert torch.equal(y, y_cast)
    assert grad is not None
    assert grad_cast is not None
    assert torch.equal(grad, grad_cast)


@pytest.mark.parametrize(
    ("hidden", "inner", "up_grouped", "down_grouped"),
    [(16, 8, True, True), (12, 8, False, False), (16, 12, True, False), (16, 6, False, False)],
)
def test_grouped_matmul_runs_only_where_all_rows_are_aligned(
    hidden: int, inner: int, up_grouped: bool, down_grouped: bool
) -> None:
    """On a GPU it wants the rows of both operands on 16 bytes; else one matmul an expert does the same."""
    inner_up = 2 * inner
    plan = make_plan(profile("random", 32, 4, 2), LoopbackRanks(1), LAUNCH)
    with FakeTensorMode():  # no GPU is needed to choose
        kind: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        up, down = torch.empty(4, inner_up, hidden, **kind), torch.empty(4, hidden, inner, **kind)
        experts = ExpertMath(SWIGLU, plan, ExpertWeights(up, down), None)
        for weight, grouped in ((up, up_grouped), (down, down_grouped)):
            for width in weight.shape[1:]:
                assert experts._grouped(torch.empty(8, width, **kind), weight) == grouped
        apart = torch.empty(4, hidden, inner_up, **kind).transpose(1, 2)
        assert not experts._grouped(torch.empty(8, hidden, **kind), apart)
