"""What OffloadStreamAdamW accepts: arguments, groups, parameters, gradients, saved states.

Everything is checked before anything is changed, so a refused step or load leaves the optimizer as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from operators.adamw_math import Hyper
from operators.errors import RuleError
from operators.stream_adamw_state import STATE_NAMES

Engine = Literal["stream", "host", "split", "device"]
_DTYPES = (torch.bfloat16, torch.float32)


def local_shard(tensor: Tensor) -> Tensor:
    """The shard of this rank of a DTensor; any other tensor as it is."""
    return cast(Tensor, tensor._local_tensor) if hasattr(tensor, "_local_tensor") else tensor


def fingerprint(param: Tensor) -> tuple[int, ...]:
    """Changes when anyone writes the weights in place or replaces them. Costs no sync."""
    local = local_shard(param)
    return int(local.untyped_storage()._cdata), int(local.storage_offset()), local._version, param._version


def flat_weight(weight: Tensor, index: int) -> Tensor:
    if not weight.is_contiguous():
        raise RuleError(
            rule="parameters are contiguous: a bucket is a slice of their flat view",
            value=f"parameter {index}: shape {tuple(weight.shape)}, strides {weight.stride()}",
            remedy="Make it contiguous before the optimizer is built.",
        )
    return weight.view(-1)


def checked_grad(param: Tensor, index: int) -> Tensor:
    """The gradient's shard, checked against its parameter."""
    grad = cast(Tensor, param.grad)
    if grad.layout != torch.strided:
        raise RuleError(
            rule="gradients are dense",
            value=f"parameter {index}: {grad.layout}",
            remedy="Build the embedding with sparse=False.",
        )
    placements = getattr(grad, "placements", None)
    if placements != getattr(param, "placements", None):
        raise RuleError(
            rule="a gradient is sharded as its parameter",
            value=f"parameter {index}: {placements}",
            remedy="Reduce the gradient to the parameter's placements before the step.",
        )
    local = local_shard(grad)
    if local.dtype not in _DTYPES or local.shape != local_shard(param).shape:
        raise RuleError(
            rule="a gradient is bf16 or fp32 and has its parameter's shape",
            value=f"parameter {index}: {local.dtype}, {tuple(local.shape)}",
            remedy="Convert the gradient before the step.",
        )
    return local


def check_parameters(params: list[Tensor]) -> torch.device:
    device = local_shard(params[0]).device
    for index, param in enumerate(params):
        local = local_shard(param)
        if local.dtype not in _DTYPES or local.layout != torch.strided:
            raise RuleError(
                rule="parameters are dense and bf16 or fp32",
                value=f"parameter {index}: {local.dtype}, {local.layout}",
                remedy="Convert the module, or give other dtypes to another optimizer.",
            )
        if local.device != device or device.type == "meta":
            raise RuleError(
                rule="all parameters lie on one real device",
                value=f"parameter {index}: {local.device}, the first: {device}",
                remedy="Materialise the module first; build one optimizer per device.",
            )
        flat_weight(local.detach(), index)
    return device


def check_group(group: Mapping[str, Any]) -> None:
    Hyper.of(group)
    if group.get("amsgrad"):
        raise RuleError(
            rule="amsgrad is not supported: no third moment is kept",
            value=True,
            remedy="Set amsgrad=False, or use torch.optim.AdamW.",
        )
    if group.get("maximize"):  # a loaded state of torch's AdamW may bring it along
        raise RuleError(
            rule="maximize is not supported: a step goes down the gradient",
            value=True,
            remedy="Negate the loss.",
        )
    replicas = group.get("replicas", 1)
    if not isinstance(replicas, int) or replicas < 1:
        raise RuleError(
            rule="replicas counts the ranks that hold the same copy",
            value=replicas,
            remedy="Use 1 for parameters that lie on one rank.",
        )


def check_arguments(
    engine: str,
    staging_slots: int,
    host_share: float,
    max_grad_norm: float | None,
    host_threads: int | None,
) -> None:
    if engine not in get_args(Engine):
        raise RuleError(
            rule="engine is one of stream, host, split, device", value=engine, remedy="Choose one."
        )
    if staging_slots < 1:
        raise RuleError(
            rule="staging_slots is at least 1",
            value=staging_slots,
            remedy="Use 2 or 3: with 1 nothing overlaps.",
        )
    if not 0 <= host_share <= 1 or (host_share and engine != "split"):
        raise RuleError(
            rule="host_share lies in [0, 1] and belongs to engine='split'",
            value=(engine, host_share),
            remedy="Set engine='split', or leave host_share at 0.",
        )
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise RuleError(
            rule="max_grad_norm is above 0",
            value=max_grad_norm,
            remedy="Leave it unset to clip nothing.",
        )
    if host_threads is not None and host_threads < 1:
        raise RuleError(
            rule="host_threads is at least 1",
            value=host_threads,
            remedy="Leave it unset to use torch's threads.",
        )


def checked_entry(
    entry: Mapping[str, Any] | None, local: Tensor, index: int
) -> tuple[int, dict[str, Tensor]] | None:
    """Steps and flat states of one saved parameter, checked."""
    if not entry:
        return None
    states = {name: local_shard(entry[name]) for name in STATE_NAMES if isinstance(entry.get(name), Tensor)}
    for name in ("step", "exp_avg", "exp_avg_sq"):
        if (name != "step" and name not in states) or name not in entry:
            raise RuleError(
                rule="a saved AdamW state has step, exp_avg and exp_avg_sq",
                value=f"parameter {index}: {sorted(entry)}",
                remedy="Load the dictionary of an AdamW optimizer.",
            )
    for name, value in states.items():
        if value.shape != local.shape:
            raise RuleError(
                rule="a saved state has its parameter's shape",
                value=f"parameter {index}, {name}: {tuple(value.shape)} for {tuple(local.shape)}",
                remedy="Load a state of the same model, shard by shard.",
            )
    return int(entry["step"]), {name: value.reshape(-1) for name, value in states.items()}
