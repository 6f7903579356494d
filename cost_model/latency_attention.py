"""Time of the dense side: attention segments, dense feed-forward parts and ZeRO-3's collectives."""

from __future__ import annotations

import math

from cost_model.latency import GroupLinks, Number, all_to_all_seconds, dense_seconds, gather_seconds
from cost_model.model_spec import ModelSpec
from cost_model.rates import RateView

BACKWARD_SCORES = 2.5
"""Backward of the score products over their forward: five matmuls for two."""


def score_flops(model: ModelSpec, tokens: int, context: int) -> tuple[float, float]:
    """Forward score FLOPs of one (full, sliding) attention layer for ``tokens`` tokens of a rank, causal.

    A token sees half the context on average, or its window: 2*(d_qk + d_v)*heads a pair, so N*C*heads*(d_qk+d_v).
    """
    a = model.attention
    pair = 2.0 * a.heads * (a.head_dim + a.v_head_dim)
    full = tokens * pair * context / 2.0
    window = min(a.sliding_window or context, context)
    # The first `window` tokens see fewer; their triangle counts half.
    sliding = tokens * pair * window * (1.0 - window / (2.0 * context))
    return full, sliding


def width_gain(head_dim: int) -> float:
    """Rate of the score products at this head width over the rate at 64.

    One H200: 430 TFLOP/s at 64, 500 at 112, 540 at 128 (benchmarks/results, attention). A cube root goes through
    them within 3 %; above 128 nothing was measured, so nothing more is promised.
    """
    return math.cbrt(min(head_dim, 128) / 64.0)


def exchange_bytes(model: ModelSpec, tokens: int, sequence_degree: int, scalar_bytes: int) -> float:
    """Bytes of q, k, v and o that a rank emits around one attention; kv heads are repeated when D exceeds them."""
    a = model.attention
    kv_heads = max(a.kv_heads, sequence_degree) if a.kind == "gqa" else a.heads
    widths = a.heads * (a.head_dim + a.v_head_dim) + kv_heads * (a.head_dim + a.v_head_dim)
    return float(tokens) * widths * scalar_bytes


def attention_segment_seconds(
    rates: RateView,
    model: ModelSpec,
    tokens: int,
    context: int,
    *,
    links: GroupLinks,
    scalar_bytes: int,
    sliding: bool,
) -> tuple[Number, Number]:
    """(forward, backward) of one attention segment; backward includes the checkpoint's recompute."""
    full, windowed = score_flops(model, tokens, context)
    scores = (windowed if sliding else full) / (
        rates["attention_flops"] * width_gain(model.attention.head_dim)
    )
    projections = dense_seconds(rates, 2.0 * tokens * model.attention_params)
    norms = 12.0 * tokens * model.hidden * scalar_bytes / rates["hbm_bytes_per_s"]
    exchange: Number = 0.0
    if links.size > 1:
        exchange = 4.0 * all_to_all_seconds(
            rates, links, exchange_bytes(model, tokens, links.size, scalar_bytes) / 4.0
        )
    forward = scores + projections + norms + exchange + rates["segment_s"]
    backward = (
        (1.0 + BACKWARD_SCORES) * scores
        + 3.0 * projections
        + 3.0 * norms
        + 2.0 * exchange
        + 2.0 * rates["segment_s"]
    )
    return forward, backward


def dense_mlp_seconds(rates: RateView, tokens: int, params: float) -> tuple[float, float]:
    """(forward, backward with recompute) of a dense or shared feed-forward part of ``params`` parameters."""
    forward = float(dense_seconds(rates, 2.0 * tokens * params))
    return forward, 3.0 * forward


def zero_gather_seconds(rates: RateView, links: GroupLinks, layer_bytes: float) -> tuple[float, float]:
    """(forward, backward) collectives of one layer's dense weights: gather; gather again and reduce-scatter."""
    once = float(gather_seconds(rates, links, layer_bytes))
    return once, 2.0 * once
