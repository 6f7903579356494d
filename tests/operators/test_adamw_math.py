"""The rule for masters, the norm and the checks of hyperparameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from operators.adamw_math import Hyper, adopt_weights, clip_coefficient, local_norm
from operators.errors import RuleError

GROUP: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
VALUES = st.floats(width=32, allow_nan=False)


def bits(x: Tensor) -> list[int]:
    return x.view(torch.int32).tolist()


@given(pairs=st.lists(st.tuples(VALUES, VALUES, st.booleans()), min_size=1, max_size=70))
def test_masters_change_only_where_weights_do(pairs: list[tuple[float, float, bool]]) -> None:
    master = torch.tensor([m for m, _, _ in pairs])
    other = torch.tensor([w for _, w, _ in pairs]).bfloat16()
    changed = torch.tensor([c for _, _, c in pairs])
    weight = torch.where(changed, other, master.bfloat16())
    expected = torch.where(master.bfloat16() == weight, master, weight.float())

    adopt_weights(master, weight, torch.empty(len(pairs)))
    assert bits(master) == bits(expected)


def test_fp32_weights_are_their_masters() -> None:
    master, weight = torch.randn(9), torch.randn(9)
    adopt_weights(master, weight, torch.empty(9))
    assert bits(master) == bits(weight)


def test_a_nan_weight_reaches_its_master_and_no_other() -> None:
    master = torch.tensor([1.0, -0.0, 3.0])
    weight = torch.tensor([1.0, -0.0, float("nan")]).bfloat16()
    adopt_weights(master, weight, torch.empty(3))
    assert bits(master)[:2] == bits(torch.tensor([1.0, -0.0]))
    assert master[2].isnan()


def test_the_norm_is_clip_grad_norms_norm() -> None:
    torch.manual_seed(0)
    grads = [torch.randn(1003), torch.randn(5, 7), torch.randn(1)]
    total = torch.nn.utils.get_total_norm(grads)
    assert torch.equal(local_norm(grads), total)
    for limit in (0.5, 1e6):
        params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        torch.nn.utils.clip_grad_norm_(params, limit)
        for p, g in zip(params, grads, strict=True):
            assert p.grad is not None
            assert torch.equal(g * clip_coefficient(total, limit), p.grad)


def test_bf16_gradients_are_summed_in_fp32() -> None:
    grad = torch.full((3000,), 0.01).bfloat16()
    assert local_norm([grad]).dtype == torch.float32
    torch.testing.assert_close(local_norm([grad]), grad.double().norm().float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", -1.0),
        ("lr", float("nan")),
        ("betas", (1.0, 0.9)),
        ("betas", (0.9, -0.1)),
        ("eps", -1e-8),
        ("weight_decay", -0.1),
    ],
)
def test_values_out_of_range_are_refused(key: str, value: object) -> None:
    with pytest.raises(RuleError, match="AdamW's range"):
        Hyper.of({**GROUP, key: value})


def test_lr_may_be_a_cpu_tensor_but_not_a_device_tensor() -> None:
    assert Hyper.of({**GROUP, "lr": torch.tensor(0.5)}).lr == 0.5
    with pytest.raises(RuleError, match="would stop the stream"):
        Hyper.of({**GROUP, "lr": torch.tensor(0.5, device="meta")})
