"""Saving and loading: bit for bit, in any order, into any engine, and from torch's own AdamW."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from operators.errors import RuleError
from operators.stream_adamw import OffloadStreamAdamW

SETTINGS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
ENGINES: list[dict[str, Any]] = [
    {"engine": "stream"},
    {"engine": "device"},
    {"engine": "host"},
    {"engine": "split", "host_share": 0.4},
]
each_engine = pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e["engine"])


def net() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(13, 31), torch.nn.Tanh(), torch.nn.Linear(31, 3)).bfloat16()


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    for number in range(first, first + count):
        torch.manual_seed(100 + number)
        optimizer.zero_grad()
        model(torch.randn(5, 13).bfloat16()).float().square().sum().backward()
        optimizer.step()


def build(model: torch.nn.Module, **kwargs: Any) -> OffloadStreamAdamW:
    return OffloadStreamAdamW(
        model.parameters(),
        **{"bucket_params": 128, "host_bucket_params": 64, "staging_slots": 2, **SETTINGS, **kwargs},
    )


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a["state"].keys() == b["state"].keys() and all(
        torch.equal(entry[name], b["state"][i][name]) for i, entry in a["state"].items() for name in entry
    )


@each_engine
@pytest.mark.parametrize("weights_first", [True, False])
def test_ten_steps_saved_and_ten_more(engine: dict[str, Any], weights_first: bool, tmp_path: Path) -> None:
    model = net()
    optimizer = build(model, **engine)
    steps(model, optimizer, 0, 10)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    steps(model, optimizer, 10, 10)

    resumed = net()
    again = build(resumed, **engine)
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    if weights_first:
        resumed.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    if not weights_first:
        resumed.load_state_dict(saved["model"])
    steps(resumed, again, 10, 10)
    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)
    assert equal(optimizer.state_dict(), again.state_dict())


@settings(max_examples=25, deadline=None)
@given(
    before=st.sampled_from(ENGINES),
    after=st.sampled_from(ENGINES),
    buckets=st.tuples(st.integers(64, 600), st.integers(64, 600)),
    slots=st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
def test_another_engine_bucket_or_slot_count_goes_on_from_the_same_state(
    before: dict[str, Any], after: dict[str, Any], buckets: tuple[int, int], slots: tuple[int, int]
) -> None:
    model = net()
    optimizer = build(model, **before, bucket_params=buckets[0], staging_slots=slots[0], host_kernel="plain")
    steps(model, optimizer, 0, 2)
    saved = optimizer.state_dict()
    moved = build(model, **after, bucket_params=buckets[1], staging_slots=slots[1], host_kernel="plain")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        moved.load_state_dict(saved)
    assert [w.category for w in caught] == ([] if before == after else [UserWarning])
    assert equal(moved.state_dict(), saved)

    twin = net()
    twin.load_state_dict(model.state_dict())
    other = build(twin, **before, host_kernel="plain")
    other.load_state_dict(saved)
    steps(model, moved, 2, 2)
    steps(twin, other, 2, 2)
    # On one device every engine rounds alike.
    assert equal(moved.state_dict(), other.state_dict())


def test_the_share_is_saved_and_another_is_warned_of() -> None:
    model = net()
    optimizer = build(model, engine="split", host_share=0.25)
    steps(model, optimizer, 0, 1)
    saved = optimizer.state_dict()
    assert saved["flatpeak"] == {"engine": "split", "host_share": 0.25}
    with pytest.warns(UserWarning, match=r"host_share 0.25 goes on as 'split' with 0.5"):
        build(model, engine="split", host_share=0.5).load_state_dict(saved)


def test_a_state_of_torchs_adamw_loads_and_takes_its_masters_from_the_weights() -> None:
    model = net().float()
    torchs = torch.optim.AdamW(model.parameters(), fused=True, **SETTINGS)
    for number in range(2):
        torch.manual_seed(number)
        torchs.zero_grad()
        model(torch.randn(5, 13)).square().sum().backward()
        torchs.step()
    twin = net().float()
    twin.load_state_dict(model.state_dict())
    ours = build(twin)
    ours.load_state_dict(torchs.state_dict())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        q.grad = p.grad
    torchs.step()
    ours.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_lr_zero_after_a_load_leaves_other_weights_alone() -> None:
    model = net()
    optimizer = build(model)
    steps(model, optimizer, 0, 2)
    other = net()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    model.load_state_dict(other.state_dict())
    optimizer.param_groups[0]["lr"] = 0.0
    steps(model, optimizer, 2, 1)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_saving_does_not_disturb_and_does_not_share_memory() -> None:
    models = net(), net()
    watched, plain = build(models[0]), build(models[1])
    for number in range(3):
        steps(models[0], watched, number, 1)
        steps(models[1], plain, number, 1)
        for entry in watched.state_dict()["state"].values():
            entry["master"].zero_()
    assert equal(watched.state_dict(), plain.state_dict())
    saved = io.BytesIO()
    torch.save(watched.state_dict(), saved)
    assert saved.tell() < 12 * watched.flat_params + 20_000


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda e: e.pop("exp_avg"), "has step, exp_avg and exp_avg_sq"),
        (lambda e: e.update(exp_avg_sq=torch.zeros(2)), "has its parameter's shape"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(change: Any, rule: str) -> None:
    model = net()
    optimizer = build(model)
    steps(model, optimizer, 0, 1)
    before = optimizer.state_dict()
    wrong = optimizer.state_dict()
    change(wrong["state"][2])
    with pytest.raises(RuleError, match=rule):
        optimizer.load_state_dict(wrong)
    assert equal(optimizer.state_dict(), before)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert equal(optimizer.state_dict(), before)


def test_hooks_see_and_change_what_is_loaded() -> None:
    model = net()
    optimizer = build(model)
    steps(model, optimizer, 0, 2)
    saved = optimizer.state_dict()
    other = build(net())
    seen: list[float] = []

    def halve(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        state = {i: {**entry, "exp_avg": entry["exp_avg"] / 2} for i, entry in given["state"].items()}
        return {**given, "state": state}

    def look(loaded: torch.optim.Optimizer) -> None:
        seen.append(float(loaded.state_dict()["state"][0]["exp_avg"].sum()))

    other.register_load_state_dict_pre_hook(halve)
    other.register_load_state_dict_post_hook(look)
    other.load_state_dict(saved)
    entry = other.state_dict()["state"][0]
    assert torch.equal(entry["exp_avg"], saved["state"][0]["exp_avg"] / 2)
    assert torch.equal(entry["master"], saved["state"][0]["master"])
    assert seen == [float(entry["exp_avg"].sum())]


def test_between_calls_the_state_names_what_there_is() -> None:
    model = net()
    optimizer = build(model)
    assert not optimizer.state
    next(iter(model.parameters())).grad = torch.ones(31, 13).bfloat16()
    optimizer.step()
    optimizer.state_dict()
    assert [list(entry) for entry in optimizer.state.values()] == [
        ["step", "master", "exp_avg", "exp_avg_sq"]
    ]
