"""What a sample must be for a formula to read it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

NEEDED: dict[str, tuple[str, ...]] = {
    "pipelined_llep": ("tokens_per_rank", "hidden", "intermediate", "experts", "top_k"),
    "ring_dtp": ("tokens_per_rank", "hidden", "vocab"),
    "checkpoint_offload": ("tokens_per_rank", "hidden", "boundaries"),
    "stream_adamw": ("params",),
}
"""Sizes that an operator's formula cannot do without."""
_POSITIVE = ("intermediate", "chunks", "bucket_params", "staging_slots", "imbalance", "send_ratio")
_MAY_BE_NOTHING = ("strip_rows", "host_budget_bytes")
_NOT_NEGATIVE = ("migrated_experts", "host_share", *_MAY_BE_NOTHING)


def broken_rule(operator: str, values: Mapping[str, Any]) -> str | None:
    """What keeps ``values`` (shape and knobs, with ``ranks``) from being a measurement of ``operator``, or None.

    Ranks and nodes are whole and positive, and ranks stand on nodes evenly; sizes are there and positive; what may
    be 0 is not negative.
    """
    ranks: Any = values.get("ranks")
    nodes: Any = values.get("nodes", 1)
    for name, value in (("ranks", ranks), ("nodes", nodes)):
        if not _is_number(value) or value < 1 or value != int(value):
            return f"{name}={value}"
    if int(ranks) % int(nodes):
        return f"ranks={ranks} over nodes={nodes}"
    needed = NEEDED.get(operator, ())
    for name in (*needed, *(one for one in _POSITIVE if one in values)):
        if not _is_number(values.get(name)) or values[name] <= 0:
            return f"{name}={values.get(name)}"
    for name in _NOT_NEGATIVE:
        value = values.get(name, 0)
        if not (value is None and name in _MAY_BE_NOTHING) and (not _is_number(value) or value < 0):
            return f"{name}={value}"
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
