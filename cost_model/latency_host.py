"""Time of what lives on the host: offloaded boundaries and the streamed optimizer (theory sections 4 and 5)."""

from __future__ import annotations

import numpy as np

from cost_model.latency import Number, host_link_bytes_per_s, overlapped_seconds
from cost_model.rates import RateView

STATE_BYTES = 12
"""fp32 master and two moments of a parameter, each way."""


def boundary_copy_seconds(rates: RateView, boundary_bytes: float, active: int) -> float:
    """One boundary to or from the host with ``active`` cards of the node copying, all in the same direction."""
    return rates["host_copy_alpha_s"] + boundary_bytes * rates["host_duplex"] / host_link_bytes_per_s(
        rates, active
    )


def exposed_copy_seconds(rates: RateView, copy_s: float, block_s: Number) -> Number:
    """What the compute of the block beside a copy does not hide of it.

    max(0, copy - compute) where copies cost the compute nothing (``copy_overlap`` of 1); copy engines share memory
    bandwidth with it, and without a copy engine (0) every copy is exposed.
    """
    return overlapped_seconds(copy_s, block_s, rates["copy_overlap"]) - block_s


def stream_seconds(
    rates: RateView, params: float, bucket_params: Number, staging_slots: Number, active: int
) -> Number:
    """The optimizer stream: fill + drain + G * max(T_in, T_upd, T_out, (T_in + T_upd + T_out)/s).

    Args:
        params: parameters of this rank that are streamed.
        bucket_params: beta.
        staging_slots: s.
        active: cards of the node that stream at once (they share host memory).
    """
    bucket = np.minimum(np.asarray(bucket_params, dtype=np.float64), max(params, 1.0))
    # The last bucket is as long as what is left, so the count is taken with its fraction.
    buckets = np.maximum(params / bucket, 1.0)
    copy = 3.0 * rates["host_copy_alpha_s"] + bucket * STATE_BYTES / host_link_bytes_per_s(rates, active)
    update = rates["bucket_s"] + bucket / rates["adam_device_params_per_s"]
    # A bucket on its own uses one direction at a time, and that is faster: host memory carries one stream, not two.
    alone = (
        3.0 * rates["host_copy_alpha_s"] + (copy - 3.0 * rates["host_copy_alpha_s"]) * rates["host_duplex"]
    )
    whole = 2.0 * alone + update
    ideal = np.maximum(np.maximum(copy, update), whole / np.asarray(staging_slots, dtype=np.float64))
    # Where nothing overlaps (no copy engine) a bucket takes the sum of its stages, whatever the slots.
    period = ideal + (1.0 - rates["copy_overlap"]) * (whole - ideal)
    seconds: Number = (buckets - 1.0) * period + whole
    return seconds


def host_engine_seconds(rates: RateView, params_of_node: float) -> float:
    """Fused AdamW on the node's cores, transfers pipelined: all ranks of the node share them."""
    return params_of_node / rates["adam_host_params_per_s"]


def optimizer_seconds(
    rates: RateView,
    params: float,
    *,
    engine: str,
    bucket_params: Number,
    staging_slots: Number,
    host_share: float,
    active: int,
) -> Number:
    """One update of a rank's ``params`` parameters.

    ``device``: state on the card. ``stream``: the stream. ``host``: the cores. ``split``: ``host_share`` of the
    parameters on the cores while the rest streams; both use host memory, so only a share of the shorter one hides.
    """
    if engine == "device":
        return params / rates["adam_device_params_per_s"] + 0.0 * np.asarray(bucket_params, dtype=np.float64)
    if engine == "host":
        return host_engine_seconds(rates, params * active) + 0.0 * np.asarray(bucket_params, dtype=np.float64)
    if engine == "stream":
        return stream_seconds(rates, params, bucket_params, staging_slots, active)
    streamed = stream_seconds(rates, params * (1.0 - host_share), bucket_params, staging_slots, active)
    return overlapped_seconds(
        streamed, host_engine_seconds(rates, params * host_share * active), rates["split_overlap"]
    )
