"""Saving and loading through torch.distributed.checkpoint, on shards of 2 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from operators.ranks import ProcessRanks
from operators.stream_adamw import OffloadStreamAdamW
from tests.gang import gang

SETTINGS: dict[str, Any] = {
    "lr": 1e-2,
    "weight_decay": 0.1,
    "bucket_params": 64,
    "host_bucket_params": 64,
    "staging_slots": 2,
}


def sharded(ranks: ProcessRanks, seed: int) -> torch.nn.Module:
    """Uneven shards: 13 and 3 rows over the ranks."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(11, 13), torch.nn.Tanh(), torch.nn.Linear(13, 3)).bfloat16()
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks.size,)))
    return model


def steps(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, first: int, count: int
) -> None:
    for number in range(first, first + count):
        torch.manual_seed(100 * number + rank)
        model(torch.randn(5, 11).bfloat16()).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor of a state by its path, DTensors as their shards."""
    out: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            out |= {f"{key}.{name}": one for name, one in flat(value).items()}
        elif isinstance(value, torch.Tensor):
            out[str(key)] = value.to_local() if isinstance(value, DTensor) else value
    return out


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[key]) for key, value in a.items())


def saved_and_resumed(ranks: ProcessRanks, folder: str, engine: Any, flattened: bool) -> list[bool]:
    options = StateDictOptions(flatten_optimizer_state_dict=flattened)
    model = sharded(ranks, 0)
    optimizer = OffloadStreamAdamW(model.parameters(), engine=engine, **SETTINGS)
    steps(model, optimizer, ranks.rank, 0, 3)
    weights, state = get_state_dict(model, optimizer, options=options)
    asked = flat(get_optimizer_state_dict(model, optimizer, options=options))
    undisturbed = same(asked, flat(state))
    save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    steps(model, optimizer, ranks.rank, 3, 2)

    again = sharded(ranks, 1)
    resumed = OffloadStreamAdamW(again.parameters(), engine=engine, **SETTINGS)
    weights, state = get_state_dict(again, resumed, options=options)
    load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(again, resumed, model_state_dict=weights, optim_state_dict=state, options=options)
    loaded = same(flat(get_optimizer_state_dict(again, resumed, options=options)), asked)
    steps(again, resumed, ranks.rank, 3, 2)
    ended = same(flat(resumed.state_dict()["state"]), flat(optimizer.state_dict()["state"]))
    weights_equal = same(flat(dict(again.named_parameters())), flat(dict(model.named_parameters())))
    return [undisturbed, loaded, ended, weights_equal]


@pytest.mark.parametrize(("engine", "flattened"), [("stream", False), ("stream", True), ("host", False)])
def test_a_checkpoint_of_shards_resumes_bit_for_bit(tmp_path: Any, engine: str, flattened: bool) -> None:
    for held in gang(2).run(saved_and_resumed, str(tmp_path), engine, flattened):
        assert held == [True] * 4


def whole_states(ranks: ProcessRanks) -> tuple[bool, bool]:
    options = StateDictOptions(full_state_dict=True)
    model = sharded(ranks, 0)
    optimizer = OffloadStreamAdamW(model.parameters(), **SETTINGS)
    steps(model, optimizer, ranks.rank, 0, 2)
    whole = get_optimizer_state_dict(model, optimizer, options=options)
    shape = whole["state"]["0.weight"]["master"].shape == (13, 11)  # type: ignore[index,union-attr,call-overload]
    twin = sharded(ranks, 0)
    other = OffloadStreamAdamW(twin.parameters(), **SETTINGS)
    set_optimizer_state_dict(twin, other, optim_state_dict=whole, options=options)
    return shape, same(flat(other.state_dict()["state"]), flat(optimizer.state_dict()["state"]))


def test_a_full_state_is_gathered_and_dealt_out_again() -> None:
    assert gang(2).run(whole_states) == [(True, True)] * 2
