"""What goes wrong around a dispatch: flipped order, wrong ids, wrong dtypes, frozen weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from operators.dispatch_launch import DispatchLaunch
from operators.dry_run import PeakTracker
from operators.errors import RuleError
from operators.expert_mlp import ExpertWeights
from operators.pipelined_llep import PipelinedLLEP, pipelined_llep
from operators.ranks import LoopbackRanks, ProcessRanks
from operators.routing import Routing, profile, replay_routing, route
from tests.gang import Gang, gang
from tests.operators.dense_moe import draw

LAUNCH = DispatchLaunch(chunk_tokens=4, min_rows=2)


def _two_layers(ranks: ProcessRanks, flipped: bool, checkpointed: bool) -> str:
    """Backward of two equal layers, on rank 0 the other way round if ``flipped``; what was raised."""
    layers = [PipelinedLLEP(6, 5, 6, ranks=ranks, launch=LAUNCH) for _ in range(2)]
    outputs = []
    for layer in layers:
        x, scores = torch.randn(9, 6, requires_grad=True), torch.rand(9, 6)

        def block(h: Tensor, s: Tensor, layer: PipelinedLLEP = layer) -> Any:
            return layer(h, s, route(s, 2))

        run: Callable[..., Any] = (
            partial(checkpoint, block, use_reentrant=False, context_fn=replay_routing)
            if checkpointed
            else block
        )
        outputs.append(run(x, scores))
    order = outputs[::-1] if flipped and ranks.rank == 0 else outputs
    try:
        for y in order:
            y.sum().backward()
    except (RuntimeError, RuleError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("checkpointed", [False, True])
def test_another_order_of_backward_on_one_rank_fails_at_once_and_on_all_ranks(checkpointed: bool) -> None:
    """Both layers have the same splits: unnoticed, their rows would mix without any error."""
    own = Gang(3, collective_timeout_s=10)
    try:
        assert own.run(_two_layers, False, checkpointed) == [""] * 3
        start = monotonic()
        said = own.run(_two_layers, True, checkpointed, timeout_s=30)
        assert monotonic() - start < 10, "found by a timeout instead of a comparison"
    finally:
        own.close(kill=True)
    assert all("in one order on all ranks" in text for text in said), said


def _wrong_id(ranks: ProcessRanks) -> str:
    ids = torch.tensor([[0, 1], [2, 3]])
    if ranks.rank == 1:
        ids[1, 1] = 9
    layer = PipelinedLLEP(6, 5, 4, ranks=ranks, launch=LAUNCH)
    try:
        layer(torch.randn(2, 6), torch.rand(2, 4), Routing(ids, 4))
    except RuleError as error:
        return str(error)
    return ""


def test_an_expert_that_does_not_exist_is_refused_on_all_ranks() -> None:
    for text in gang(2).run(_wrong_id):
        assert "every picked expert lies in [0, experts)" in text
        assert "[0, 1]" in text, "says which rank picked it"


def _call(**change: Any) -> Tensor:
    given: dict[str, Any] = {
        "hidden": torch.randn(9, 6),
        "scores": torch.rand(9, 4),
        "weights": ExpertWeights(torch.randn(4, 10, 6), torch.randn(4, 6, 5)),
        **change,
    }
    return pipelined_llep(
        given["hidden"],
        given["scores"],
        profile("random", 9, 4, 2),
        given["weights"],
        ranks=LoopbackRanks(1),
        launch=LAUNCH,
    )


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"scores": torch.rand(9, 4, dtype=torch.float64)}, "float64 router scores go with a float64 layer"),
        ({"hidden": torch.randn(8, 6)}, "hidden is [tokens, hidden]"),
        ({"hidden": torch.randn(9, 6).bfloat16()}, "hidden and expert weights have one dtype"),
        ({"scores": torch.rand(9, 2)}, "scores are [tokens, experts]"),
        (
            {"weights": ExpertWeights(torch.randn(4, 10, 6), torch.randn(4, 5, 6))},
            "gate_up is [experts/ranks, 2·intermediate, hidden]",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change: dict[str, Any], rule: str) -> None:
    with pytest.raises(RuleError, match=rule.split("[", maxsplit=1)[0]):
        _call(**change)


def _frozen(ranks: ProcessRanks, chunks: int) -> tuple[int, int, bool]:
    """Backward peak above what forward left, with and without weight gradients; equality of the rest."""
    tokens = 12
    routings = [profile("skew:80/2", tokens, 4, 2, r, ranks=ranks.size) for r in range(ranks.size)]
    layer = draw(routings, 6, 64, bias=True, dtype=torch.float32)
    launch = DispatchLaunch.for_chunks(chunks, tokens, min_rows=2, lambda_=1.1)
    peaks, grads = [], []
    for frozen in (False, True):
        own = layer.local(ranks.rank, ranks.size)
        for weight in own:
            assert weight is not None
            weight.requires_grad_(not frozen)
        x = layer.hidden[ranks.rank].clone().requires_grad_()
        y = pipelined_llep(x, layer.scores[ranks.rank], routings[ranks.rank], own, ranks=ranks, launch=launch)
        with PeakTracker() as tracker:
            y.backward(layer.grads[ranks.rank])
        peaks.append(tracker.peak_bytes)
        assert all((weight.grad is None) == frozen for weight in own if weight is not None)
        assert x.grad is not None
        grads.append(x.grad)
    return peaks[0], peaks[1], torch.equal(grads[0], grads[1])


@pytest.mark.parametrize("chunks", [1, 3])
def test_frozen_experts_have_no_accumulators(chunks: int) -> None:
    matrices = 2 * 3 * 6 * 64 * 4  # of a rank's own two experts, in float32
    for trained, frozen, equal in gang(2).run(_frozen, chunks):
        assert trained - frozen >= matrices
        assert equal
