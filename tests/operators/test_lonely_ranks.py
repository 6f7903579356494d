"""A rank that fails alone: its peers end with an error, and nobody gets a result made of rows that do not match.

The user's own code raises on one rank between two collectives. What the others wait for never comes, so the group's
timeout ends them; a rank that goes on to its next step meets peers in another call, and that ends as well.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from operators.checkpoint_offload import OffloadSession
from operators.dispatch_launch import DispatchLaunch
from operators.errors import RuleError
from operators.pipelined_llep import PipelinedLLEP
from operators.ranks import ProcessRanks
from operators.ring_dtp import RingMode, ring_dtp
from operators.routing import route
from operators.stream_adamw import OffloadStreamAdamW
from tests.gang import Gang, RankFailed

_TIMEOUT_S = 1.0


class UserError(Exception):
    """What the model's own code raised."""


class _Run:
    """One call of an operator; ``forward`` keeps its graph, ``backward`` runs it."""

    def __init__(self, ranks: ProcessRanks) -> None:
        self.ranks = ranks
        self.out = torch.zeros(())

    def forward(self) -> None:
        raise NotImplementedError

    def backward(self) -> None:
        self.out.sum().backward()


class _Dispatch(_Run):
    backward_form = "chunked"

    def forward(self) -> None:
        torch.manual_seed(0)
        launch = DispatchLaunch(chunk_tokens=4, min_rows=2, backward=self.backward_form)  # type: ignore[arg-type]
        layer = PipelinedLLEP(6, 5, 4, ranks=self.ranks, launch=launch)
        x, scores = torch.randn(12, 6, requires_grad=True), torch.rand(12, 4)
        self.out = layer(x, scores, route(scores, 2))


class _Nested(_Dispatch):
    backward_form = "nested"


class _Head(_Run):
    mode: RingMode = "activations"

    def forward(self) -> None:
        hidden, weight = torch.randn(12, 6, requires_grad=True), torch.randn(5, 6, requires_grad=True)
        self.out = ring_dtp(hidden, weight, torch.arange(12) % 10, ranks=self.ranks, mode=self.mode)


class _Weights(_Head):
    mode = "weights"


class _Gather(_Head):
    mode = "gather"


class _Exchanges(_Run):
    """Two exchanges of another kind and the same size."""

    def forward(self) -> None:
        to_the_other = [4, 0] if self.ranks.rank else [0, 4]
        self.ranks.all_to_all(torch.empty(4), torch.ones(4), to_the_other, to_the_other).wait()

    def backward(self) -> None:
        self.ranks.shift(torch.ones(4), torch.empty(4)).wait()


class _Offload(_Run):
    def forward(self) -> None:
        OffloadSession(1 << 16, ranks=self.ranks, device="cpu").close()


class _Optimizer(_Run):
    def forward(self) -> None:
        parameter = nn.Parameter(torch.ones(64))
        parameter.grad = torch.ones(64)
        OffloadStreamAdamW(
            [parameter], engine="device", bucket_params=64, max_grad_norm=1.0, norm_ranks=self.ranks
        ).step()


_CASES: list[tuple[type[_Run], str]] = [
    (_Dispatch, "forward"),
    (_Dispatch, "backward"),
    (_Nested, "backward"),
    (_Head, "backward"),
    (_Weights, "backward"),
    (_Gather, "backward"),
    (_Offload, "forward"),
    (_Optimizer, "forward"),
]


def _ends(ranks: ProcessRanks, cases: list[tuple[type[_Run], str]], goes_on: bool) -> list[str]:
    """How each case ended on this rank; rank 1's own code fails before ``where``."""
    timeout = timedelta(seconds=_TIMEOUT_S)
    # one each: a timeout breaks it
    groups = [dist.new_group(backend="gloo", timeout=timeout) for _ in cases]
    ends = []
    for group, (kind, where) in zip(groups, cases, strict=True):
        run = kind(ProcessRanks(group))
        try:
            if where == "backward":
                run.forward()
            try:
                if ranks.rank == 1:
                    raise UserError
                run.forward() if where == "forward" else run.backward()
            except UserError:
                if not goes_on:
                    raise
                kind(run.ranks).forward()  # this rank leaves the step out
            ends.append("went through")
        except UserError:
            ends.append("its own error")
        except (RuntimeError, RuleError) as error:
            ends.append(f"{type(error).__name__}: {error}")
        ranks.barrier()
    return ends


@pytest.fixture
def two() -> Gang:
    return Gang(2, collective_timeout_s=60)


def test_the_others_end_with_an_error_when_a_rank_stops(two: Gang) -> None:
    try:
        waiting, failed = two.run(_ends, _CASES, False)
    finally:
        two.close(kill=True)
    assert failed == ["its own error"] * len(_CASES)
    for (kind, where), end in zip(_CASES, waiting, strict=True):
        assert "Timed out" in end, (kind, where, end)


@pytest.mark.parametrize("kind", [_Exchanges, _Dispatch, _Head, _Gather])
def test_a_rank_that_leaves_a_step_out_gets_no_result_and_gives_none(two: Gang, kind: type[_Run]) -> None:
    # Where sizes differ gloo ends the process and names a collective mismatch; here they would fit.
    try:
        for rank, ends in enumerate(two.run(_ends, [(kind, "backward")], True)):
            assert "went through" not in ends, (rank, ends)
    except RankFailed as error:
        assert "the rank died" in str(error)  # noqa: PT017 - the other way to end
    finally:
        two.close(kill=True)


def test_a_dropped_tensor_hook_leaves_the_layer_usable_on_all_ranks(two: Gang) -> None:
    try:
        assert two.run(_after_a_hook) == [True, True]
    finally:
        two.close(kill=True)


def _after_a_hook(ranks: ProcessRanks) -> bool:
    """All ranks raise in the user's hook half-way through backward of two layers; the next step is right."""
    torch.manual_seed(ranks.rank)
    launch = DispatchLaunch(chunk_tokens=4, min_rows=2)
    layers = [PipelinedLLEP(6, 5, 4, ranks=ranks, launch=launch) for _ in range(2)]
    x, scores = torch.randn(9, 6, requires_grad=True), torch.rand(9, 4)

    def step(hook: bool) -> Tensor:
        between = layers[0](x, scores, route(scores, 2))
        if hook:
            between.register_hook(_raise)
        (grad,) = torch.autograd.grad(layers[1](between, scores, route(scores, 2)).sum(), x)
        return grad

    want = step(False)
    with pytest.raises(UserError):
        step(True)
    return torch.equal(step(False), want)


def _raise(_: Tensor) -> None:
    raise UserError
