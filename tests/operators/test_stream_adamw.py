"""OffloadStreamAdamW's step: equal to torch's AdamW in every engine, whatever the shapes, β and s."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from operators.bounds.stream_adamw import staging_bytes
from operators.errors import RuleError
from operators.flat_buckets import flat_params
from operators.stream_adamw import OffloadStreamAdamW

ENGINES: list[dict[str, Any]] = [
    {"engine": "stream"},
    {"engine": "device"},
    {"engine": "host", "host_bucket_params": 128, "host_kernel": "plain"},
    {"engine": "split", "host_share": 0.4, "host_bucket_params": 128, "host_kernel": "plain"},
]
SETTINGS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}
each_engine = pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e["engine"])


def parameters(shapes: list[Any], dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s).to(dtype)) for s in shapes]


def fp32_twins(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """What torch's AdamW is run on: fp32 masters of the same weights."""
    return [torch.nn.Parameter(p.detach().float().clone()) for p in params]


def give_grads(
    params: list[torch.nn.Parameter], twins: list[torch.nn.Parameter], dtype: torch.dtype | None = None
) -> None:
    for p, twin in zip(params, twins, strict=True):
        p.grad = torch.randn(p.shape).to(dtype or p.dtype)
        twin.grad = p.grad.float()


def masters(optimizer: OffloadStreamAdamW) -> list[Tensor]:
    return [entry["master"] for entry in optimizer.state_dict()["state"].values()]


def assert_equal(
    params: list[torch.nn.Parameter], twins: list[torch.nn.Parameter], optimizer: OffloadStreamAdamW
) -> None:
    for p, twin, master in zip(params, twins, masters(optimizer), strict=True):
        assert torch.equal(master, twin)
        assert torch.equal(p, twin.to(p.dtype))


@settings(max_examples=80, deadline=None)
@given(
    shapes=st.lists(
        st.one_of(
            st.just(()), st.tuples(st.integers(0, 400)), st.tuples(st.integers(1, 20), st.integers(1, 40))
        ),
        min_size=1,
        max_size=6,
    ),
    engine=st.sampled_from(ENGINES),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    bucket_params=st.integers(64, 700),
    staging_slots=st.integers(1, 4),
    host_share=st.floats(0, 1),
    host_bucket_params=st.none() | st.integers(64, 700),
)
def test_every_engine_is_torchs_adamw(
    shapes: list[Any],
    engine: dict[str, Any],
    dtype: torch.dtype,
    bucket_params: int,
    staging_slots: int,
    host_share: float,
    host_bucket_params: int | None,
) -> None:
    if engine["engine"] == "split":
        engine = {**engine, "host_share": host_share}
    engine = {**engine, "host_bucket_params": host_bucket_params}
    params = parameters(shapes, dtype)
    twins = fp32_twins(params)
    ours = OffloadStreamAdamW(
        params, **SETTINGS, **engine, bucket_params=bucket_params, staging_slots=staging_slots
    )
    torchs = torch.optim.AdamW(twins, fused=True, **SETTINGS)
    for _ in range(3):
        give_grads(params, twins)
        ours.step()
        torchs.step()
    assert_equal(params, twins, ours)


@each_engine
def test_1003_parameters_cut_at_500_keep_their_last_bit(engine: dict[str, Any]) -> None:
    params = parameters([1003])
    twins = fp32_twins(params)
    ours = OffloadStreamAdamW(params, **SETTINGS, **{**engine, "host_bucket_params": 500}, bucket_params=500)
    torchs = torch.optim.AdamW(twins, fused=True, **SETTINGS)
    for _ in range(20):
        give_grads(params, twins)
        ours.step()
        torchs.step()
    assert_equal(params, twins, ours)


@each_engine
def test_three_micro_batches_clipped_once(engine: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(13, 31), torch.nn.Tanh(), torch.nn.Linear(31, 3))
    twin = torch.nn.Sequential(torch.nn.Linear(13, 31), torch.nn.Tanh(), torch.nn.Linear(31, 3))
    twin.load_state_dict(model.state_dict())
    ours = OffloadStreamAdamW(
        model.parameters(), **SETTINGS, **engine, bucket_params=100, staging_slots=2, max_grad_norm=0.1
    )
    torchs = torch.optim.AdamW(twin.parameters(), fused=True, **SETTINGS)
    for _ in range(3):
        batches = [torch.randn(5, 13) for _ in range(3)]
        for net in (model, twin):
            net.zero_grad()
            for batch in batches:
                net(batch).square().sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        ours.step()
        torchs.step()
        assert ours.last_grad_norm is not None
        assert torch.equal(ours.last_grad_norm, norm)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, q)


def test_clipping_leaves_the_gradients_alone() -> None:
    params = parameters([100])
    params[0].grad = torch.ones(100)
    OffloadStreamAdamW(params, max_grad_norm=0.1).step()
    assert torch.equal(params[0].grad, torch.ones(100))


@each_engine
def test_groups_keep_their_own_values_also_inside_one_bucket(engine: dict[str, Any]) -> None:
    params = parameters([100, 30, 5, 70], torch.bfloat16)
    twins = fp32_twins(params)
    values: list[dict[str, Any]] = [
        {"weight_decay": 0.3},
        {"weight_decay": 0.0, "lr": 0.1, "betas": (0.5, 0.9)},
    ]
    groups = [{"params": ps, **v} for ps, v in zip((params[:2], params[2:]), values, strict=True)]
    twin_groups = [{"params": ps, **v} for ps, v in zip((twins[:2], twins[2:]), values, strict=True)]
    ours = OffloadStreamAdamW(groups, **engine, bucket_params=4096)
    torchs = torch.optim.AdamW(twin_groups, fused=True)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (ours, torchs)]
    for _ in range(4):
        give_grads(params, twins)
        for optimizer, schedule in zip((ours, torchs), schedules, strict=True):
            optimizer.step()
            schedule.step()
    assert_equal(params, twins, ours)


@each_engine
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_gradients_in_bf16_or_fp32(engine: dict[str, Any], grad_dtype: torch.dtype) -> None:
    params = parameters([200, 77])
    twins = fp32_twins(params)
    ours = OffloadStreamAdamW(params, **SETTINGS, **engine, bucket_params=128)
    torchs = torch.optim.AdamW(twins, fused=True, **SETTINGS)
    for _ in range(2):
        for p, twin in zip(params, twins, strict=True):
            p.grad = None
            p.grad_dtype = grad_dtype
            p.grad = torch.randn(p.shape).to(grad_dtype)
            twin.grad = p.grad.float()
        ours.step()
        torchs.step()
    assert_equal(params, twins, ours)


@each_engine
def test_parameters_without_a_gradient_are_left_and_not_counted(engine: dict[str, Any]) -> None:
    params = parameters([100, 30, 500])
    twins = fp32_twins(params)
    ours = OffloadStreamAdamW(params, **SETTINGS, **engine, bucket_params=128, staging_slots=2)
    torchs = torch.optim.AdamW(twins, fused=True, **SETTINGS)
    for skipped in (1, 2, 0, None):
        give_grads(params, twins)
        if skipped is not None:
            params[skipped].grad = twins[skipped].grad = None
        ours.step()
        torchs.step()
    assert_equal(params, twins, ours)
    assert [int(e["step"]) for e in ours.state_dict()["state"].values()] == [3, 3, 3]


def test_a_step_without_gradients_does_nothing() -> None:
    params = parameters([10])
    before = params[0].detach().clone()
    optimizer = OffloadStreamAdamW(params, max_grad_norm=1.0)
    assert optimizer.step() is None
    assert torch.equal(params[0], before)
    assert optimizer.state_dict()["state"] == {}


def test_a_closure_is_called_with_gradients_on() -> None:
    params = parameters([10])
    optimizer = OffloadStreamAdamW(params, **SETTINGS)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = params[0].square().sum()
        loss.backward()
        return loss

    before = params[0].detach().clone()
    assert optimizer.step(closure) == before.square().sum()
    assert not torch.equal(params[0], before)


@each_engine
def test_weights_loaded_after_construction_become_the_masters(engine: dict[str, Any]) -> None:
    params = parameters([100, 300], torch.bfloat16)
    ours = OffloadStreamAdamW(params, **engine, lr=0.0, weight_decay=0.1, bucket_params=128)
    for round_ in range(2):
        loaded = [torch.randn(p.shape).bfloat16() for p in params]
        with torch.no_grad():
            for p, new in zip(params, loaded, strict=True):
                p.copy_(new)
        give_grads(params, fp32_twins(params))
        ours.step()
        for p, new, master in zip(params, loaded, masters(ours), strict=True):
            assert torch.equal(p, new), round_
            assert torch.equal(master, new.float())


@each_engine
def test_replaced_storage_and_writes_through_data_are_taken_up(engine: dict[str, Any]) -> None:
    params = parameters([100, 300], torch.bfloat16)
    ours = OffloadStreamAdamW(params, **engine, lr=0.0, bucket_params=128)
    give_grads(params, fp32_twins(params))
    ours.step()
    first, second = torch.randn(100).bfloat16(), torch.randn(300).bfloat16()
    params[0].data = first.clone()
    params[1].data.copy_(second)
    ours.adopt_weights()
    ours.step()
    assert torch.equal(params[0], first)
    assert torch.equal(params[1], second)


@pytest.mark.parametrize(
    ("slots", "bucket_params", "expected"), [(1, 128, 128), (3, 640, 640), (2, 700, 640), (2, 10**7, 1024)]
)
def test_staging_is_exactly_s_beta_16(slots: int, bucket_params: int, expected: int) -> None:
    optimizer = OffloadStreamAdamW(parameters([1003]), bucket_params=bucket_params, staging_slots=slots)
    assert optimizer.bucket_params == expected
    assert optimizer.staging_bytes == staging_bytes(expected, slots)
    assert optimizer.host_bytes == 12 * flat_params([1003])


def test_host_memory_may_be_lent() -> None:
    params = parameters([1003])
    memory = torch.full((12 * 1024 + 64,), 7, dtype=torch.uint8)
    optimizer = OffloadStreamAdamW(params, **SETTINGS, host_memory=memory)
    twins = fp32_twins(params)
    give_grads(params, twins)
    optimizer.step()
    torch.optim.AdamW(twins, fused=True, **SETTINGS).step()
    assert_equal(params, twins, optimizer)
    assert (memory[12 * 1024 :] == 7).all()
    with pytest.raises(RuleError, match="at least 12288 bytes"):
        OffloadStreamAdamW(params, host_memory=memory[:100])


@each_engine
def test_contiguous_views_of_one_tensor_and_odd_gradient_strides(engine: dict[str, Any]) -> None:
    whole = torch.randn(40, 10)
    params = [torch.nn.Parameter(whole[:7]), torch.nn.Parameter(whole[7:])]
    twins = fp32_twins(params)
    ours = OffloadStreamAdamW(params, **SETTINGS, **engine, bucket_params=64)
    for p, twin in zip(params, twins, strict=True):
        p.grad = torch.randn(p.shape[1], p.shape[0]).T
        twin.grad = p.grad.contiguous()
    ours.step()
    torch.optim.AdamW(twins, fused=True, **SETTINGS).step()
    assert_equal(params, twins, ours)
    assert torch.equal(whole[:7], twins[0])
