"""The schedule under delayed lanes: what waits for what, shown on the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from operators.stream_adamw import OffloadStreamAdamW
from tests.operators.lanes import HeldLanes, Slow

SHAPES = [(200, 3), (7,), (65,), (1,)]
BUCKET = 128


def train(
    make_lanes: Any, steps: int, slots: int, live: list[list[bool]], engine: Any = "stream"
) -> tuple[list[Tensor], dict[str, Any]]:
    """Steps queued back to back: the compute lane writes gradients and reads weights, as a model would."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s).bfloat16()) for s in SHAPES]
    lanes: list[Any] = []

    def lanes_of(device: torch.device) -> Any:
        lanes.append(make_lanes(device))
        return lanes[-1]

    optimizer = OffloadStreamAdamW(
        params,
        lr=1e-2,
        weight_decay=0.1,
        engine=engine,
        host_share=0.4 if engine == "split" else 0.0,
        bucket_params=BUCKET,
        host_bucket_params=BUCKET,
        staging_slots=slots,
        host_kernel="plain",
        make_lanes=lanes_of,
    )
    (owner,) = lanes
    held = [torch.zeros(s).bfloat16() for s in SHAPES]
    seen: list[Tensor] = []
    for step in range(steps):
        for param, grad, lives in zip(params, held, live[step], strict=True):
            value = torch.randn(grad.shape).bfloat16()
            owner.submit("compute", partial(grad.copy_, value))
            param.grad = grad if lives else None
        optimizer.step()
        for param in params:  # what the next forward pass would see
            seen.append(torch.zeros(param.shape, dtype=param.dtype))
            owner.submit("compute", partial(seen[-1].copy_, param.detach()))
    state = optimizer.state_dict()
    return seen, state


def same(ours: tuple[list[Tensor], Any], reference: tuple[list[Tensor], Any]) -> bool:
    pairs = list(zip(ours[0], reference[0], strict=True))
    for index, entry in reference[1]["state"].items():
        pairs += [(ours[1]["state"][index][name], value) for name, value in entry.items()]
    return all(torch.equal(a, b) for a, b in pairs)


def reference(steps: int, live: list[list[bool]]) -> tuple[list[Tensor], dict[str, Any]]:
    from operators.staging import InlineLanes

    return train(lambda _: InlineLanes(), steps, 1, live)


@pytest.mark.parametrize("slow", ["in", "out", "compute", "random"])
@pytest.mark.parametrize("slots", [1, 2, 3, 7])
def test_a_delayed_lane_changes_nothing(slow: Slow, slots: int) -> None:
    live = [[True] * 4] * 3
    ours = train(lambda _: HeldLanes(slow), 3, slots, live)
    assert len(ours[0]) == 12
    assert same(ours, reference(3, live))


@settings(max_examples=60, deadline=None)
@given(
    slow=st.sampled_from(["in", "out", "compute", "random"]),
    seed=st.integers(0, 999),
    slots=st.integers(1, 5),
    live=st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=3, max_size=3),
)
def test_no_order_of_the_lanes_changes_a_bit(
    slow: Slow, seed: int, slots: int, live: list[list[bool]]
) -> None:
    assert same(train(lambda _: HeldLanes(slow, seed), 3, slots, live), reference(3, live))


@pytest.mark.parametrize("slow", ["in", "out", "random"])
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("engine", ["host", "split"])
def test_a_delayed_lane_of_the_host_pass_changes_nothing(slow: Slow, slots: int, engine: str) -> None:
    live = [[True] * 4, [True, False, True, True], [True] * 4]
    assert same(train(lambda _: HeldLanes(slow), 3, slots, live, engine), reference(3, live))


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_beside_a_host_pass_the_stream_is_queued_bucket_by_bucket(slots: int) -> None:
    """What is queued whole would hold up the copies that the host pass queues later."""
    lanes: list[HeldLanes] = []

    def lanes_of(_: torch.device) -> HeldLanes:
        lanes.append(HeldLanes("random"))
        return lanes[-1]

    params = [torch.nn.Parameter(torch.randn(4000).bfloat16())]
    params[0].grad = torch.randn(4000).bfloat16()
    optimizer = OffloadStreamAdamW(
        params,
        engine="split",
        host_share=0.25,
        bucket_params=64,
        host_bucket_params=64,
        staging_slots=slots,
        host_kernel="plain",
        make_lanes=lanes_of,
    )
    optimizer.step()
    assert lanes[0].left <= 3 * slots + 4
    optimizer.drain()
    assert lanes[0].left == 0
    assert lanes[0].ran > 3 * 40


@pytest.mark.parametrize("slow", ["in", "out", "compute"])
def test_a_forgotten_dependency_would_be_seen(slow: Slow) -> None:
    live = [[True] * 4] * 3
    assert not same(train(lambda _: HeldLanes(slow, forget=True), 3, 2, live), reference(3, live))


class NoValueRead(TorchDispatchMode):
    """Refuse what makes the host read a tensor's value: on a device each is a sync."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in {
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.nonzero,
            torch.ops.aten.equal,
            torch.ops.aten.is_nonzero,
        }
        return func(*args, **(kwargs or {}))


def test_a_step_only_queues_and_reads_no_value() -> None:
    lanes: list[HeldLanes] = []

    def lanes_of(device: torch.device) -> HeldLanes:
        lanes.append(HeldLanes("random"))
        return lanes[-1]

    params = [torch.nn.Parameter(torch.randn(s).bfloat16()) for s in SHAPES]
    optimizer = OffloadStreamAdamW(params, bucket_params=BUCKET, max_grad_norm=1.0, make_lanes=lanes_of)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape).bfloat16()
        with NoValueRead():  # type: ignore[no-untyped-call]
            optimizer.step()
    assert [one.ran for one in lanes] == [0]
    with NoValueRead():  # type: ignore[no-untyped-call]
        optimizer.drain()
    assert lanes[0].ran > 3 * 3 * (sum(p.numel() for p in params) // BUCKET)
