"""Eq. 6 of one point of a sweep: the operator's terms, and what its matmul library keeps beside them."""

from __future__ import annotations

from tuner.registry import OperatorAdapter, Shape
from tuner.space import Config

_LIBRARY_BYTES = 64 * 2**20
"""Workspace of the matmul library of a CUDA rank; on an H200 it is 57 to 59 MiB."""


def bound_terms(
    adapter: OperatorAdapter, shape: Shape, config: Config, ranks: int, *, provider: str, device: str
) -> dict[str, int]:
    """Terms of one rank in bytes, whose sum bounds the measured peak.

    Args:
        ranks: of the group that the operator talks through.
        device: ``cpu`` or ``cuda``; on CUDA an operator that multiplies matrices has ``library_workspace`` too.
    """
    terms = dict(adapter.bound_bytes(shape, config, ranks, provider))
    if device == "cuda" and adapter.multiplies:
        terms["library_workspace"] = _LIBRARY_BYTES
    return terms
