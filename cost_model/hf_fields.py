"""Reading single fields of a ``config.json``: many spellings, one validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cost_model.errors import RuleError

ALIASES: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "d_model", "n_embd"),
    "layers": ("num_hidden_layers", "n_layers", "num_layers", "n_layer"),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "heads": ("num_attention_heads", "n_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads", "kv_n_heads", "n_kv_heads", "num_kv_heads", "num_query_groups"),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels"),
    "experts": (
        "n_routed_experts",
        "num_experts",
        "num_local_experts",
        "moe_num_experts",
        "num_moe_experts",
        "num_routed_experts",
        "n_experts",
    ),
    "top_k": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "experts_per_token",
        "moe_topk",
        "moe_top_k",
        "moe_k",
        "top_k_experts",
        "moe_router_topk",
        "num_selected_experts",
    ),
    "expert_intermediate": (
        "moe_intermediate_size",
        "expert_ffn_hidden_size",
        "moe_ffn_hidden_size",
        "expert_intermediate_size",
        "ffn_hidden_size",
        "intermediate_size",
    ),
    "dense_intermediate": ("intermediate_size_mlp", "ffn_hidden_size", "intermediate_size", "ffn_dim"),
    "context": (
        "max_position_embeddings",
        "model_max_length",
        "max_seq_len",
        "seq_length",
        "max_sequence_length",
        "initial_context_length",
    ),
}
"""Meaning to the names it goes by, the most specific first."""

LIMITS: dict[str, int] = {
    "hidden": 2**20,
    "layers": 2**16,
    "vocab": 2**28,
    "heads": 2**16,
    "kv_heads": 2**16,
    "head_dim": 2**16,
    "experts": 2**20,
    "top_k": 2**20,
    "expert_intermediate": 2**24,
    "dense_intermediate": 2**24,
    "context": 2**40,
}
"""Largest believable value of each; a larger one is a mistake that would only overflow later."""


PER_LAYER = ("experts", "top_k", "expert_intermediate", "dense_intermediate")
"""What some families write as a list, one number a layer."""


class Fields:
    """Validated access to one mapping of a ``config.json``."""

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        self.mapping = mapping

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.mapping.get(name) is not None

    def named(self, meaning: str) -> str | None:
        """The spelling under which a meaning is given, None when it is not given."""
        return next((name for name in ALIASES[meaning] if self.has(name)), None)

    def count(self, name: str, *, least: int = 1, most: int = 2**40, per_layer: bool = True) -> int:
        """A whole number.

        Some families write one number per layer; equal ones are read as that number.

        Raises:
            RuleError: not a whole number, out of range, or different from layer to layer.
        """
        value = self.mapping.get(name)
        if per_layer and isinstance(value, Sequence) and not isinstance(value, str) and value:
            if any(item != value[0] for item in value):
                raise RuleError(
                    rule=f"{name} must be the same in every layer",
                    value=value,
                    remedy="A planner needs one shape for all MoE layers; give the largest as a number.",
                )
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int):
            raise RuleError(
                rule=f"{name} must be a whole number",
                value=self.mapping.get(name),
                remedy=f"Write {name} as a plain JSON integer.",
            )
        if not least <= value <= most:
            raise RuleError(
                rule=f"{name} must be from {least} to {most}",
                value=value,
                remedy="Correct the value; config.json of the released model shows it.",
            )
        return value

    def meaning(self, meaning: str) -> int | None:
        """The value of a meaning under whatever name it goes, None when it is not given."""
        name = self.named(meaning)
        if name is None:
            return None
        return self.count(name, most=LIMITS[meaning], per_layer=meaning in PER_LAYER)

    def optional(self, *names: str, default: int = 0, least: int = 0) -> int:
        """The first of ``names`` that is given, or ``default``."""
        name = next((name for name in names if self.has(name)), None)
        return default if name is None else self.count(name, least=least)

    def flag(self, *names: str, default: bool = False) -> bool:
        """The first of ``names`` that is given as true or false, or ``default``.

        Raises:
            RuleError: the value is neither true nor false.
        """
        for name in names:
            if not self.has(name):
                continue
            value = self.mapping[name]
            if not isinstance(value, bool):
                raise RuleError(
                    rule=f"{name} must be true or false", value=value, remedy="Write it as a JSON boolean."
                )
            return value
        return default

    def sequence(self, name: str, length: int | None = None) -> list[Any] | None:
        """A list field, None when it is not given.

        Raises:
            RuleError: not a list, or of another length than the layers there are.
        """
        if not self.has(name):
            return None
        value = self.mapping[name]
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise RuleError(rule=f"{name} must be a list", value=value, remedy="Write it as a JSON array.")
        if length is not None and len(value) != length:
            raise RuleError(
                rule=f"{name} has one entry per layer ({length})",
                value=len(value),
                remedy=f"Correct {name} or the number of layers.",
            )
        return list(value)

    def text(self, name: str, default: str) -> str:
        """A string field, or ``default``."""
        value = self.mapping.get(name)
        return value if isinstance(value, str) and value else default
