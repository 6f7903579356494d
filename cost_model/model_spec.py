"""What a decoder-only Mixture-of-Experts model is, as far as memory and time go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
            return query + key_value + a.heads * a.v_head_dim * hidden + 2 * hidden
        q_width, k_width, v_width = a.heads * a.head_dim, a.kv_heads * a.head_dim, a.kv_heads * a.v_head_dim
        o_width = a.heads * a.v_head_dim
        params = hidden * (q_width + k_width + v_width) + o_width * hidden + 2 * hidden
        if a.bias:
            params += q_width + k_width + v_width + hidden
        if a.qk_norm:
            params += 2 * a.head_dim
        if a.sinks:
            params += a.heads
        return params

    @property
    def expert_params(self) -> int:
        """Parameters of ONE routed expert (gate, up and down projections; biases where the family has them)."""
        params = 3 * self.hidden * self.expert_intermediate
        if self.expert_bias:
            params += 2 * self.expert_intermediate + self.hidden
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
        return 3 * self.hidden * self.shared_intermediate * self.shared_experts

    @property
    def dense_mlp_params(self) -> int:
        """Parameters of the feed-forward part of one dense layer."""
        return 3 * self.hidden * self.dense_intermediate

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
            + self.layers * self.attention_params
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
        """L_b: attention and MoE are checkpoint segments of their own, and the first input is the embedding."""
        return 2 * self.layers - 1
