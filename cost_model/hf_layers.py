"""Which layers of a released model hold experts, and how each mixes tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cost_model.errors import RuleError
from cost_model.hf_fields import Fields

FULL = ("full_attention", "attention", "global_attention", "full")
SLIDING = ("sliding_attention", "chunked_attention", "local_attention", "sliding_window")
RECURRENT = ("linear_attention", "mamba", "mamba2", "recurrent")


def moe_layer_count(fields: Fields, layers: int) -> int:
    """How many of ``layers`` hold routed experts, by whichever rule the family writes.

    Raises:
        RuleError: a rule is malformed, or leaves no layer with experts.
    """
    count = sum(_moe_layers(fields, layers))
    if count == 0:
        raise RuleError(
            rule="at least one layer must hold routed experts",
            value=0,
            remedy="Check the fields that say which layers are dense; a dense model has no dispatch to plan.",
        )
    return count


def _moe_layers(fields: Fields, layers: int) -> list[bool]:
    kinds = fields.sequence("mlp_layer_types", layers)
    if kinds is not None:
        return [_is_sparse(kind) for kind in kinds]
    explicit = _explicit(fields, layers)
    if explicit is not None:
        return explicit
    first_dense = fields.optional("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
    last = fields.optional("moe_layer_end_index", default=layers - 1) if _positive(fields) else layers - 1
    sparse = [first_dense <= index <= last for index in range(layers)]
    frequency = fields.mapping.get("moe_layer_freq")
    if isinstance(frequency, list):
        pattern = fields.sequence("moe_layer_freq", layers) or []
        return [keep and bool(flag) for keep, flag in zip(sparse, pattern, strict=True)]
    if frequency is not None:
        step = fields.count("moe_layer_freq")
        sparse = [keep and index % step == 0 for index, keep in enumerate(sparse)]
    for name in (
        "decoder_sparse_step",
        "moe_layer_interval",
        "moe_layer_frequency",
        "interleave_moe_layer_step",
    ):
        if fields.has(name):
            step = fields.count(name)
            sparse = [keep and (index + 1) % step == 0 for index, keep in enumerate(sparse)]
    if fields.has("expert_layer_period"):
        period, offset = fields.count("expert_layer_period"), fields.optional("expert_layer_offset")
        sparse = [keep and index % period == offset for index, keep in enumerate(sparse)]
    dense = _indices(fields, "mlp_only_layers", layers)
    return [keep and index not in dense for index, keep in enumerate(sparse)]


def _positive(fields: Fields) -> bool:
    """Some families write -1 for 'the last layer'."""
    return fields.mapping.get("moe_layer_end_index") != -1


def _is_sparse(kind: Any) -> bool:
    if kind not in ("sparse", "moe", "dense", "mlp"):
        raise RuleError(
            rule="mlp_layer_types knows 'sparse' and 'dense'",
            value=kind,
            remedy="Use one of the two per layer.",
        )
    return kind in ("sparse", "moe")


def _explicit(fields: Fields, layers: int) -> list[bool] | None:
    """A written list of the layers with experts."""
    enumerated = fields.mapping.get("moe_layers_enum")
    if isinstance(enumerated, str) and enumerated.strip():
        try:
            chosen = {int(part) for part in enumerated.split(",")}
        except ValueError:
            raise RuleError(
                rule="moe_layers_enum lists layer numbers parted by commas",
                value=enumerated,
                remedy="Write it like '3,4,5'.",
            ) from None
        return [index in chosen for index in range(layers)]
    if fields.has("moe_layers"):
        chosen = _indices(fields, "moe_layers", layers)
        return [index in chosen for index in range(layers)]
    return None


def _indices(fields: Fields, name: str, layers: int) -> set[int]:
    values = fields.sequence(name) or []
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < layers:
            raise RuleError(
                rule=f"{name} lists layer numbers from 0 to {layers - 1}",
                value=value,
                remedy="Correct the list.",
            )
    return set(values)


def token_mixing(fields: Fields, layers: int) -> tuple[int, int]:
    """How layers mix tokens.

    Returns:
        (layers that attend within a window only, layers that mix by a recurrence).

    Raises:
        RuleError: a kind of layer that this reader does not know.
    """
    for name in ("layer_types", "layers_block_type"):
        kinds = fields.sequence(name, layers)
        if kinds is not None:
            return _count_kinds(name, kinds)
    attends = fields.sequence("attn_type_list", layers)
    if attends is not None:  # 1 softmax attention, 0 linear attention
        return 0, sum(1 for flag in attends if flag == 0)
    if fields.has("attn_layer_period"):
        period, offset = fields.count("attn_layer_period"), fields.optional("attn_layer_offset")
        return 0, sum(1 for index in range(layers) if index % period != offset)
    if fields.has("full_attention_interval") and fields.has("linear_num_value_heads"):
        interval = fields.count("full_attention_interval")
        return 0, sum(1 for index in range(layers) if (index + 1) % interval)
    if fields.has("sliding_window") and fields.flag("use_sliding_window", default=False):
        return max(0, layers - fields.optional("max_window_layers", default=0)), 0
    if fields.has("sliding_window") and fields.has("swiglu_limit"):  # every other layer
        return (layers + 1) // 2, 0
    return 0, 0


def _count_kinds(name: str, kinds: Iterable[Any]) -> tuple[int, int]:
    sliding = recurrent = 0
    for kind in kinds:
        if kind in SLIDING:
            sliding += 1
        elif kind in RECURRENT:
            recurrent += 1
        elif kind not in FULL:
            raise RuleError(
                rule=f"{name} knows {', '.join((*FULL[:2], *SLIDING[:2], *RECURRENT[:2]))}",
                value=kind,
                remedy="This kind of layer has no memory formula here; describe the model with generic fields.",
            )
    return sliding, recurrent
