"""Attention and dense feed-forward segments: the tensors of the implementation, counted (theory 6, omission 5).

Widths below are scalars per resident token. All-to-alls swap sequence for heads, so what a rank holds after
the swap is as large as before it, except that fewer key-value heads than ranks are repeated.

Forward of an attention segment, nothing saved (the segment is checkpointed); the largest moment of
    h, q, k, v | q, k, v, q', k', v', one send copy | q', k', v', o' | o', o, one send copy | o, y
with primes on the exchanged side. Backward recomputes it with everything autograd keeps and adds gradients:
    h, q', k', v', o', o, lse (fp32) | dy, do' | dq', dk', dv' and flash attention's fp32 dq accumulator
plus the inputs of a query-key norm, and for ``mla`` the low-rank latents (kept, they feed the up-projections).
The first bar's tensors live until the end, so backward is the sum of all three.
"""

from __future__ import annotations

from functools import lru_cache

from cost_model.model_spec import AttentionSpec, ModelSpec

FP32 = 4


@lru_cache(maxsize=4096)
def attention_bytes(
    *, model: ModelSpec, tokens: int, sequence_degree: int, scalar_bytes: int, direction: str
) -> int:
    """Live bytes of the costliest token-mixing segment of a model on one rank.

    Args:
        model: the model.
        tokens: N, resident tokens.
        sequence_degree: D.
        scalar_bytes: b.
        direction: ``forward`` or ``backward``.
    """
    per_token = _attention_per_token(model.attention, model.hidden, sequence_degree, scalar_bytes, direction)
    if model.mixer_layers:
        per_token = max(per_token, _mixer_per_token(model, scalar_bytes, direction))
    return tokens * per_token


def attention_factor(model: ModelSpec, sequence_degree: int, *, direction: str = "backward") -> float:
    """a of Eq. 6: live attention bytes in units of N*H*b at b = 2."""
    one = attention_bytes(
        model=model, tokens=1, sequence_degree=sequence_degree, scalar_bytes=2, direction=direction
    )
    return one / (2 * model.hidden)


def _attention_per_token(a: AttentionSpec, hidden: int, degree: int, b: int, direction: str) -> int:
    q, o = a.heads * a.head_dim, a.heads * a.v_head_dim
    k, v = a.kv_heads * a.head_dim, a.kv_heads * a.v_head_dim
    repeat = -(-degree // a.kv_heads)  # fewer key-value heads than ranks: each is sent to several
    k_x, v_x = k * repeat, v * repeat
    qkv, qkv_x = q + k + v, q + k_x + v_x
    gate = o if a.output_gate else 0
    latents = (a.q_lora_rank or 0) + (a.kv_lora_rank or 0) + a.rope_head_dim if a.kind == "mla" else 0
    if degree == 1:  # nothing is exchanged: both sides are one tensor
        if direction == "forward":
            return (max(hidden + latents + qkv, qkv + o, o + 2 * hidden) + gate) * b
        kept = hidden + latents + qkv + o + 2 * gate
    elif direction == "forward":
        moments = (
            hidden + latents + qkv + gate,
            qkv + qkv_x + max(q, k_x) + gate,
            qkv_x + o + gate,
            3 * o + gate,
            o + 2 * hidden,
        )
        return max(moments) * b
    else:
        kept = hidden + latents + qkv_x + 2 * o + 2 * gate
    if a.qk_norm:
        kept += q + k
    log_sum = a.heads * FP32 * 2  # the log-sum-exp and its partner delta, fp32
    gradients = 2 * hidden + o + qkv_x
    return (kept + gradients) * b + log_sum + q * FP32


def _mixer_per_token(model: ModelSpec, b: int, direction: str) -> int:
    """A recurrent mixer: its projections, their exchanged copies and, backward, the gradients of both."""
    copies = 2 if direction == "forward" else 4
    return (copies * model.mixer_width + 3 * model.hidden) * b


@lru_cache(maxsize=4096)
def dense_block_bytes(
    *, tokens: int, hidden: int, intermediate: int, scalar_bytes: int, direction: str
) -> int:
    """Live bytes of a dense feed-forward block that every resident token passes.

    Forward: h, gate, up, their product, y. Backward: h and the first three kept, their gradients, dy and dh.
    """
    if not intermediate:
        return 0
    scalars = 2 * hidden + 3 * intermediate if direction == "forward" else 3 * hidden + 6 * intermediate
    return tokens * scalars * scalar_bytes
