"""SCO around a decoder whose Mixture-of-Experts segments keep their own input: 2L-1 boundaries, the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from operators.checkpoint_offload import OffloadReport, OffloadSession
from operators.dispatch_launch import DispatchLaunch
from operators.pinned_slab import page_rounded
from operators.pipelined_llep import PipelinedLLEP
from operators.ranks import Ranks
from operators.routing import route
from tests.gang import gang

_N, _H, _E, _L = 32, 40, 4, 3
_BOUNDARY = _N * _H * 4


class _Layer(nn.Module):
    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.mix = nn.Linear(_H, _H)
        self.router = nn.Linear(_H, _E, bias=False)
        launch = DispatchLaunch.for_chunks(2, _N, min_rows=1)
        self.experts = PipelinedLLEP(_H, 2 * _H, _E, ranks=ranks, launch=launch)

    def attend(self, x_NH: Tensor) -> Tensor:
        y_NH: Tensor = torch.tanh(self.mix(x_NH))
        return x_NH + y_NH

    def forward(self, x_NH: Tensor) -> Tensor:
        x_NH = checkpoint(self.attend, x_NH, use_reentrant=False)
        scores_NE = self.router(x_NH.detach()).softmax(dim=1)
        y_NH: Tensor = self.experts(x_NH, scores_NE, route(scores_NE, 2))
        return x_NH + y_NH


def _grads(layers: nn.ModuleList, embed: nn.Parameter, session: OffloadSession | None) -> list[Tensor]:
    layers.zero_grad()
    tokens_NH = torch.randn(_N, _H, generator=torch.Generator().manual_seed(5))

    def forward() -> Tensor:
        x_NH = tokens_NH * embed
        for layer in layers:
            x_NH = layer(x_NH)
        return x_NH.square().mean()

    if session is None:
        loss = forward()
    else:
        with session:
            loss = forward()
    loss.backward()
    return [p.grad.clone() for p in layers.parameters() if p.grad is not None]


def _run(ranks: Ranks) -> tuple[bool, OffloadReport]:
    torch.manual_seed(7)
    layers = nn.ModuleList([_Layer(ranks) for _ in range(_L)])
    embed = nn.Parameter(torch.ones(_H))
    want = _grads(layers, embed, None)
    session = OffloadSession(
        100 * page_rounded(_BOUNDARY),
        ranks=ranks,
        boundary_bytes=_BOUNDARY,
        boundaries=2 * _L,
        device="cpu",
    )
    same = True
    for _ in range(2):
        got = _grads(layers, embed, session)
        same = same and len(got) > 0 and all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    report = session.report()
    session.close()
    return same, report


@pytest.mark.parametrize("size", [1, 2])
def test_attention_and_experts_are_segments_of_their_own(size: int) -> None:
    for same, report in gang(size).run(_run):
        assert same
        # the input of attention and of the experts, in every layer; the last of them stays
        assert (report.blocks, report.boundaries, report.offloaded) == (2 * _L, 2 * _L, 2 * _L - 1)
        assert report.most_restored <= 2
        assert report.used_bytes == 0
