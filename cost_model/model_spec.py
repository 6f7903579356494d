"""What a decoder-only Mixture-of-Experts model is, as far as memory and time go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from cost_model.errors import RuleError

AttentionKind = Literal["gqa", "mla"]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention segment. Widths are per head, in scalars."""

    kind: AttentionKind
    heads: int
    kv_heads: int
    head_dim: int
    """Width of a query and key head (for ``mla`` the no-position plus rotary part)."""
    v_head_dim: int
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    rope_head_dim: int = 0
    bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    sliding_window: int | None = None
    sliding_layers: int = 0
    """How many of the model's layers see only ``sliding_window`` tokens."""
    output_gate: bool = False
    """The query projection also yields a gate of the output's width."""
    extra_params: int = 0
    """Parameters of one segment outside the projections above (a sparse-attention indexer)."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model's shape. Counts are scalars unless the name says otherwise (theory: H, I, L, V, E, k)."""

    name: str
    family: str
    hidden: int
    layers: int
    vocab: int
    attention: AttentionSpec
    experts: int
    top_k: int
    expert_intermediate: int
    moe_layers: int
    dense_layers: int = 0
    dense_intermediate: int = 0
    shared_experts: int = 0
    shared_intermediate: int = 0
    """Intermediate width of ONE shared expert."""
    expert_bias: bool = False
    router_bias: bool = False
    tied_embeddings: bool = False
    max_context: int | None = None
    mlp_matrices: int = 3
    """Matrices of one feed-forward block: gate, up and down; 2 where nothing gates."""
    shared_gate: bool = False
    """The shared expert is scaled by a learned gate of ``hidden`` weights."""
    mixer_layers: int = 0
    """How many of ``layers`` mix tokens by a recurrence (linear attention, state space), not by attention."""
    mixer_params: int = 0
    """Parameters of ONE such mixer, its norms included."""
    mixer_width: int = 0
    """Scalars per token that one mixer's projections yield."""

    @property
    def attention_layers(self) -> int:
        """Layers that really attend."""
        return self.layers - self.mixer_layers

    @property
    def attention_params(self) -> int:
        """Parameters of one attention segment, its norms included."""
        a, hidden = self.attention, self.hidden
        if a.kind == "mla":
            rope, nope = a.rope_head_dim, a.head_dim - a.rope_head_dim
            kv_rank = a.kv_lora_rank or 0
            if a.q_lora_rank:
                query = hidden * a.q_lora_rank + a.q_lora_rank + a.q_lora_rank * a.heads * a.head_dim
            else:
                query = hidden * a.heads * a.head_dim
            key_value = hidden * (kv_rank + rope) + kv_rank + kv_rank * a.heads * (nope + a.v_head_dim)
            return query + key_value + a.heads * a.v_head_dim * hidden + 2 * hidden + a.extra_params
        q_width, k_width, v_width = a.heads * a.head_dim, a.kv_heads * a.head_dim, a.kv_heads * a.v_head_dim
        o_width = a.heads * a.v_head_dim
        params = hidden * (q_width + k_width + v_width) + o_width * hidden + 2 * hidden
        if a.bias:
            params += q_width + k_width + v_width + hidden
        if a.qk_norm:
            params += 2 * a.head_dim
        if a.sinks:
            params += a.heads
        if a.output_gate:
            params += hidden * o_width
        return params + a.extra_params

    @property
    def expert_params(self) -> int:
        """Parameters of ONE routed expert (its projections; biases where the family has them)."""
        params = self.mlp_matrices * self.hidden * self.expert_intermediate
        if self.expert_bias:
            params += (self.mlp_matrices - 1) * self.expert_intermediate + self.hidden
        return params

    @property
    def routed_params(self) -> int:
        """Parameters of all routed experts of all layers."""
        return self.moe_layers * self.experts * self.expert_params

    @property
    def router_params(self) -> int:
        """Parameters of one router."""
        return self.hidden * self.experts + (self.experts if self.router_bias else 0)

    @property
    def shared_params(self) -> int:
        """Parameters of the shared experts of one layer."""
        gate = self.hidden if self.shared_gate and self.shared_experts else 0
        return self.mlp_matrices * self.hidden * self.shared_intermediate * self.shared_experts + gate

    @property
    def dense_mlp_params(self) -> int:
        """Parameters of the feed-forward part of one dense layer."""
        return self.mlp_matrices * self.hidden * self.dense_intermediate

    @property
    def head_params(self) -> int:
        """Parameters of the output head, counted whether tied or not."""
        return self.vocab * self.hidden

    @property
    def total_params(self) -> int:
        """Theta: all trainable parameters, tied ones once."""
        embeddings = self.head_params * (1 if self.tied_embeddings else 2)
        per_moe_layer = self.router_params + self.shared_params
        return (
            embeddings
            + self.hidden
            + self.attention_layers * self.attention_params
            + self.mixer_layers * self.mixer_params
            + self.dense_layers * self.dense_mlp_params
            + self.moe_layers * per_moe_layer
            + self.routed_params
        )

    @property
    def dense_params(self) -> int:
        """Everything that is not a routed expert: what ZeRO-3 gathers layer by layer."""
        return self.total_params - self.routed_params

    @property
    def boundaries(self) -> int:
        """L_b: attention and feed-forward are checkpoint segments of their own; the first input is the embedding.

        2L - 1 where every layer has both; counted by segments where a family has layers of one kind only.
        """
        return self.layers + self.dense_layers + self.moe_layers - 1

    def to_json(self) -> dict[str, Any]:
        """A plain mapping that ``from_json`` reads back."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> ModelSpec:
        """The spec that ``to_json`` wrote.

        Raises:
            RuleError: a field is unknown, missing or of the wrong kind.
        """
        known = {f.name for f in fields(cls)}
        values = dict(_only_known(body, known, "model spec"))
        attention = values.get("attention")
        if not isinstance(attention, Mapping):
            raise RuleError(
                rule="a model spec holds its attention as a mapping",
                value=attention,
                remedy="Give the mapping that a stored spec shows under 'attention'.",
            )
        known_attention = {f.name for f in fields(AttentionSpec)}
        try:
            values["attention"] = AttentionSpec(**_only_known(attention, known_attention, "attention"))
            spec = cls(**values)
        except TypeError as error:
            raise RuleError(
                rule="a model spec has every required field",
                value=sorted(body),
                remedy=f"Add what is missing: {error}.",
            ) from None
        spec.check()
        return spec

    def check(self) -> None:
        """Refuse a spec that describes no model.

        Raises:
            RuleError: a count is not a whole number in range, or two counts contradict each other.
        """
        for owner, minimum_one in (
            (self, ("hidden", "layers", "vocab", "experts", "top_k", "expert_intermediate", "moe_layers")),
            (self.attention, ("heads", "kv_heads", "head_dim", "v_head_dim")),
        ):
            for field in fields(owner):
                value = getattr(owner, field.name)
                kind = str(field.type)
                optional = value is None and "None" in kind
                wanted = {"bool": bool, "str": str}.get(kind)
                if wanted is not None and not isinstance(value, wanted):
                    raise RuleError(
                        rule=f"{field.name} must be of type {kind}", value=value, remedy="Correct the field."
                    )
                if not kind.startswith("int") or optional:
                    continue
                least = 1 if field.name in minimum_one else 0
                if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_COUNT:
                    raise RuleError(
                        rule=f"{field.name} must be a whole number from {least} to {MAX_COUNT}",
                        value=value,
                        remedy="Correct the count.",
                    )
        self._check_relations()

    def _check_relations(self) -> None:
        a = self.attention
        if a.kind not in ("gqa", "mla"):
            raise RuleError(
                rule="attention kind is 'gqa' or 'mla'", value=a.kind, remedy="Use one of the two."
            )
        if self.top_k > self.experts:
            raise RuleError(
                rule=f"a token picks at most as many experts as there are ({self.experts})",
                value=self.top_k,
                remedy="Lower the experts per token or raise the number of experts.",
            )
        if a.heads % a.kv_heads:
            raise RuleError(
                rule=f"key-value heads must divide the attention heads ({a.heads})",
                value=a.kv_heads,
                remedy="Correct either count.",
            )
        if a.rope_head_dim > a.head_dim:
            raise RuleError(
                rule=f"the rotary part of a head is at most its width ({a.head_dim})",
                value=a.rope_head_dim,
                remedy="head_dim counts the rotary and the no-position part together.",
            )
        if self.mixer_layers > self.layers:
            raise RuleError(
                rule=f"recurrent layers are some of the {self.layers} layers",
                value=self.mixer_layers,
                remedy="Correct either count.",
            )
        if self.mlp_matrices not in (2, 3):
            raise RuleError(
                rule="a feed-forward block has 2 or 3 matrices",
                value=self.mlp_matrices,
                remedy="Use 3 for a gated block.",
            )


MAX_COUNT = 2**48
"""No single count of a model reaches this; a larger one is a mistake that would only overflow later."""


def _only_known(body: Mapping[str, Any], known: set[str], what: str) -> dict[str, Any]:
    unknown = sorted(str(name) for name in body if name not in known)
    if unknown:
        raise RuleError(
            rule=f"a {what} has only known fields",
            value=unknown,
            remedy=f"Remove them, or use one of {', '.join(sorted(known))}.",
        )
    return dict(body)
