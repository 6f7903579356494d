"""SCO around FSDP2-wrapped checkpointed blocks on two ranks: the same bits as without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from operators.checkpoint_offload import OffloadReport, OffloadSession
from operators.pinned_slab import page_rounded
from operators.ranks import Ranks
from tests.gang import gang

_N, _H, _L = 24, 32, 5


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(_H, _H)
        blocks = [
            checkpoint_wrapper(nn.Sequential(nn.Linear(_H, _H), nn.Tanh(), nn.Linear(_H, _H)))
            for _ in range(_L)
        ]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x_NH: Tensor) -> Tensor:
        x_NH = self.embed(x_NH)
        for block in self.blocks:
            x_NH = block(x_NH)
        return x_NH.square().mean()


def _run(ranks: Ranks, reshard: bool) -> tuple[bool, OffloadReport]:
    torch.manual_seed(0)
    model = _Model()
    mesh = init_device_mesh("cpu", (ranks.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)
    tokens = torch.randn(_N, _H, generator=torch.Generator().manual_seed(ranks.rank))
    session = OffloadSession(
        3 * page_rounded(_N * _H * 4),
        ranks=ranks,
        boundary_bytes=_N * _H * 4,
        boundaries=_L,
        min_bytes=1,
        device="cpu",
    )

    def grads() -> list[Tensor]:
        found = [p.grad.to_local().clone() for p in model.parameters() if isinstance(p.grad, DTensor)]
        model.zero_grad()
        return found

    model(tokens).backward()
    want = grads()
    for _ in range(2):
        with session:
            loss = model(tokens)
        loss.backward()
        got = grads()
    same = len(want) > 0 and all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    report = session.report()
    session.close()
    return same, report


@pytest.mark.parametrize("reshard", [True, False])
def test_fully_sharded_blocks(reshard: bool) -> None:
    for same, report in gang(2).run(_run, reshard):
        assert same
        assert (report.boundaries, report.offloaded, report.used_bytes) == (_L, 3, 0)
        assert report.most_restored <= 2
