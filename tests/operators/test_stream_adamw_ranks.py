"""Shards on 1, 2 and 4 ranks: the global norm, uneven and empty ranks, DTensors, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from operators.ranks import ProcessRanks
from operators.stream_adamw import OffloadStreamAdamW
from tests.gang import gang

SIZES = [1003, 64, 7, 500]
SETTINGS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


def weights_and_grads() -> tuple[list[Tensor], list[list[Tensor]]]:
    made = torch.Generator().manual_seed(5)
    weights = [torch.randn(n, generator=made, dtype=torch.float64).float() for n in SIZES]
    grads = [[torch.randn(n, generator=made, dtype=torch.float64).float() for n in SIZES] for _ in range(3)]
    return weights, grads


def dense_float64() -> list[Tensor]:
    weights, grads = weights_and_grads()
    params = [torch.nn.Parameter(w.double()) for w in weights]
    optimizer = torch.optim.AdamW(params, **SETTINGS)
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = g.double()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
    return [p.detach() for p in params]


def owned_by(rank: int, size: int, index: int) -> slice:
    """Uneven shards: the last rank of four owns nothing of most parameters."""
    n = SIZES[index]
    piece = n // size + (size > 1) * (n // (2 * size) + 1)
    return slice(min(rank * piece, n), min((rank + 1) * piece, n))


def sharded(ranks: ProcessRanks, engine: str, share: float) -> list[Tensor]:
    weights, grads = weights_and_grads()
    cuts = [owned_by(ranks.rank, ranks.size, i) for i in range(len(SIZES))]
    params = [torch.nn.Parameter(w[cut].clone()) for w, cut in zip(weights, cuts, strict=True)]
    optimizer = OffloadStreamAdamW(
        params,
        **SETTINGS,
        engine=engine,  # type: ignore[arg-type]
        host_share=share,
        host_kernel="plain",
        bucket_params=128,
        host_bucket_params=192,
        max_grad_norm=1.0,
        norm_ranks=ranks,
    )
    for step in grads:
        for p, g, cut in zip(params, step, cuts, strict=True):
            p.grad = g[cut].clone() if cut.stop > cut.start else None
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("engine", "share"), [("stream", 0.0), ("split", 0.5), ("host", 0.0)])
def test_shards_equal_the_dense_step_in_float64(size: int, engine: str, share: float) -> None:
    results = gang(size).run(sharded, engine, share)
    for index, dense in enumerate(dense_float64()):
        whole = torch.cat([result[index] for result in results])
        torch.testing.assert_close(whole.double(), dense, rtol=1e-5, atol=2e-6)


def replicated_norm(ranks: ProcessRanks) -> float:
    own = torch.nn.Parameter(torch.zeros(8))
    shared = torch.nn.Parameter(torch.zeros(4))
    own.grad = torch.full((8,), float(ranks.rank + 1))
    shared.grad = torch.full((4,), 3.0)
    groups = [{"params": [own]}, {"params": [shared], "replicas": ranks.size}]
    optimizer = OffloadStreamAdamW(groups, max_grad_norm=1.0, norm_ranks=ranks)
    optimizer.step()
    assert optimizer.last_grad_norm is not None
    return float(optimizer.last_grad_norm)


def test_a_replicated_group_counts_once_in_the_norm() -> None:
    expected = (8 * (1 + 4 + 9 + 16) + 4 * 9) ** 0.5
    assert gang(4).run(replicated_norm) == pytest.approx([expected] * 4)


def rank_without_any_gradient(ranks: ProcessRanks) -> tuple[float, bool]:
    param = torch.nn.Parameter(torch.ones(10))
    if ranks.rank == 0:
        param.grad = torch.full((10,), 2.0)
    optimizer = OffloadStreamAdamW([param], max_grad_norm=1.0, norm_ranks=ranks)
    optimizer.step()
    assert optimizer.last_grad_norm is not None
    return float(optimizer.last_grad_norm), bool((param == 1).all())


def test_a_rank_without_gradients_joins_the_norm() -> None:
    assert gang(2).run(rank_without_any_gradient) == [
        (pytest.approx(40**0.5), False),
        (pytest.approx(40**0.5), True),
    ]


def dtensors(ranks: ProcessRanks, engine: str) -> tuple[bool, bool, str]:
    mesh = init_device_mesh("cpu", (ranks.size,))
    torch.manual_seed(0)
    dense = torch.randn(10, 37).bfloat16()
    param: Any = torch.nn.Parameter(distribute_tensor(dense, mesh, [Shard(0)]))
    twin = torch.nn.Parameter(dense.float())
    optimizer = OffloadStreamAdamW([param], **SETTINGS, engine=engine, bucket_params=64)  # type: ignore[arg-type]
    reference = torch.optim.AdamW([twin], fused=True, **SETTINGS)
    for _ in range(3):
        grad = torch.randn(10, 37).bfloat16()
        param.grad = distribute_tensor(grad, mesh, [Shard(0)])
        twin.grad = grad.float()
        optimizer.step()
        reference.step()
    stepped = torch.equal(param.full_tensor(), twin.bfloat16())
    optimizer.param_groups[0]["lr"] = 0.0
    loaded = distribute_tensor(torch.randn(10, 37).bfloat16(), mesh, [Shard(0)])
    with torch.no_grad():
        param.copy_(loaded)
    optimizer.step()
    kept = torch.equal(param.full_tensor(), loaded.full_tensor())
    param.grad = distribute_tensor(torch.randn(10, 37).bfloat16(), mesh, [Shard(1)])
    try:
        optimizer.step()
    except ValueError as refusal:
        return stepped, kept, str(refusal)
    return stepped, kept, ""


@pytest.mark.parametrize("engine", ["stream", "host"])
def test_dtensors_are_updated_shard_by_shard(engine: str) -> None:
    for stepped, kept, refusal in gang(2).run(dtensors, engine):
        assert stepped
        assert kept
        assert "sharded as its parameter" in refusal
