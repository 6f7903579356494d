"""What OffloadStreamAdamW refuses, and that a refusal or a failure leaves no half-changed optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from operators.errors import RuleError
from operators.stream_adamw import OffloadStreamAdamW


def parameter(n: int = 100, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    torch.manual_seed(0)
    return torch.nn.Parameter(torch.randn(n).to(dtype))


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"amsgrad": True}, "amsgrad is not supported"),
        ({"engine": "fast"}, "engine is one of"),
        ({"bucket_params": 10}, "bucket_params is at least 64"),
        ({"engine": "host", "host_bucket_params": 10}, "host_bucket_params is at least 64"),
        ({"engine": "host", "host_threads": 0}, "host_threads is at least 1"),
        ({"staging_slots": 0}, "staging_slots is at least 1"),
        ({"host_share": 0.5}, "belongs to engine='split'"),
        ({"engine": "split", "host_share": 1.5}, "host_share lies in"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is above 0"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm is above 0"),
        ({"lr": -1.0}, "lr must be finite"),
        ({"betas": (0.9, 1.0)}, "betas"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], rule: str) -> None:
    with pytest.raises(RuleError, match=rule):
        OffloadStreamAdamW([parameter()], **arguments)


@pytest.mark.parametrize(
    ("params", "rule"),
    [
        ([torch.nn.Parameter(torch.randn(4, 5).T)], "parameters are contiguous"),
        ([torch.nn.Parameter(torch.randn(4).half())], "bf16 or fp32"),
        ([torch.nn.Parameter(torch.randn(4, device="meta"))], "one real device"),
        ([{"params": [torch.nn.Parameter(torch.randn(4))], "replicas": 0}], "replicas counts"),
        ([{"params": [torch.nn.Parameter(torch.randn(4))], "amsgrad": True}], "amsgrad is not supported"),
        ([{"params": [torch.nn.Parameter(torch.randn(4))], "maximize": True}], "maximize is not supported"),
    ],
)
def test_wrong_parameters(params: list[Any], rule: str) -> None:
    with pytest.raises(RuleError, match=rule):
        OffloadStreamAdamW(params)


def test_groups_are_given_at_the_start() -> None:
    optimizer = OffloadStreamAdamW([parameter()])
    with pytest.raises(RuleError, match="given when the optimizer is built"):
        optimizer.add_param_group({"params": [parameter()]})


def test_a_refused_step_changes_nothing() -> None:
    params = [parameter(), parameter(70)]
    optimizer = OffloadStreamAdamW(params, bucket_params=64, engine="stream")
    params[0].grad = torch.ones(100)
    params[1].grad = torch.ones(70)
    optimizer.param_groups[0]["eps"] = -1.0
    before = [p.detach().clone() for p in params]
    with pytest.raises(RuleError, match="eps must be finite"):
        optimizer.step()
    optimizer.param_groups[0]["eps"] = 1e-8
    params[1].grad = torch.sparse_coo_tensor(
        torch.tensor([[3]]), torch.tensor([1.0]), (70,), check_invariants=True
    )
    with pytest.raises(RuleError, match="gradients are dense"):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert optimizer.state_dict()["state"] == {}
    params[1].grad = torch.ones(70)
    optimizer.step()
    assert not torch.equal(params[1], before[1])


@pytest.mark.parametrize("engine", ["stream", "host", "split", "device"])
def test_a_step_that_fails_half_way_says_so_until_a_state_is_loaded(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [parameter(500)]
    optimizer = OffloadStreamAdamW(
        params,
        bucket_params=64,
        engine=engine,
        host_share=0.5 if engine == "split" else 0.0,
        host_bucket_params=64,
        host_kernel="plain",
    )
    params[0].grad = torch.ones(500)
    optimizer.step()
    saved, weights = optimizer.state_dict(), params[0].detach().clone()
    optimizer.step()
    expected = params[0].detach().clone()

    update, calls = torch._fused_adamw_, 0

    def fail(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise torch.OutOfMemoryError("out of memory")
        update(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_fused_adamw_", fail)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    for refused in (optimizer.step, optimizer.state_dict):
        with pytest.raises(RuntimeError, match="failed half-way"):
            refused()

    with torch.no_grad():
        params[0].copy_(weights)
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert torch.equal(params[0], expected)
