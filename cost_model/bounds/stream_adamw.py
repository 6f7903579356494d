"""Bytes of OffloadStreamAdamW: the staging term s·β·16 of Eq. 6, and what the engines keep on the host.

``params`` counts the elements one rank owns. Its tensors are laid end to end, each rounded up to 64 elements:
with many tiny tensors pass the rounded count.
"""

from __future__ import annotations

STATE_BYTES = 12  # fp32 master and two moments
GRADIENT_BYTES = 4  # the gradient, staged in fp32
HOST_BUCKET_PARAMS = 25_000_000  # of a host pass, unless given: finer ones pay for waking its threads
SCALE_BYTES = 256  # where the clip coefficient comes down to a host pass


def staging_bytes(bucket_params: int, staging_slots: int) -> int:
    """Device bytes of the stream's slots: ``s · β · 16`` (master, two moments, gradient, all fp32)."""
    return staging_slots * bucket_params * (STATE_BYTES + GRADIENT_BYTES)


def stream_adamw_terms(
    *, params: int, bucket_params: int, staging_slots: int, engine: str, host_share: float = 0.0
) -> dict[str, int]:
    """Device bytes by term; their sum is the peak of a step, without weights and gradients.

    Args:
        params: parameters of the rank.
        bucket_params: β, parameters of a bucket.
        staging_slots: s.
        engine: ``stream``, ``host``, ``split`` or ``device`` (state on the card, one gradient workspace).
        host_share: share of the parameters updated on the host (``split``); the stream still needs its slots.
    """
    if engine == "device":
        return {
            "optimizer_staging": min(bucket_params, params) * GRADIENT_BYTES,
            "optimizer_state": params * STATE_BYTES,
        }
    streams = engine == "stream" or (engine == "split" and host_share < 1.0)
    return {"optimizer_staging": staging_bytes(bucket_params, staging_slots) if streams else 0}


def host_bytes(
    *,
    params: int,
    bucket_params: int,
    staging_slots: int,
    engine: str,
    host_share: float = 0.0,
    host_bucket_params: int | None = None,
) -> int:
    """Host bytes of a rank: 12 a parameter; for a host pass s slots of a bucket's gradient and weight.

    Args:
        host_bucket_params: parameters of a bucket of the host pass; None: 25 million or β, whichever is more,
            and no more than there are.
    """
    if engine == "device":
        return 0
    passes = engine == "host" or (engine == "split" and host_share > 0.0)
    bucket = host_bucket_params
    if bucket is None:
        bucket = min(max(bucket_params, HOST_BUCKET_PARAMS), params)
    slots = staging_slots * bucket * 2 * GRADIENT_BYTES + SCALE_BYTES if passes else 0
    return params * STATE_BYTES + slots
