"""What was measured: the box of features an operator's samples span, and how far outside it a shape lies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cost_model.provenance import Provenance
from cost_model.rates import CostModel

_WIDTH_PER_E_FOLD = 0.5
"""Log width added per factor of e outside the box."""
REFUSAL_DISTANCE = math.log(1024.0)
"""Beyond three orders of magnitude in total a prediction is refused when the caller asks for strictness."""

_FEATURES: dict[str, tuple[str, ...]] = {
    "pipelined_llep": (
        "tokens_per_rank",
        "hidden",
        "intermediate",
        "experts",
        "top_k",
        "ranks",
        "nodes",
        "chunks",
    ),
    "ring_dtp": ("tokens_per_rank", "hidden", "vocab", "ranks", "nodes", "strip_rows"),
    "checkpoint_offload": ("tokens_per_rank", "hidden"),
    "stream_adamw": ("params", "bucket_params", "staging_slots", "ranks"),
}


class OutsideMeasured(UserWarning):
    """A prediction lies outside what was measured; the message says on which side, and what to measure."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """Where a shape lies: ``distance`` is the sum of log distances to the box, 0 inside."""

    covered: bool
    distance: float
    message: str

    @property
    def provenance(self) -> Provenance | None:
        """``interpolated`` inside the box, ``transferred`` outside it; None where there is none."""
        if self.covered:
            return "interpolated"
        return "transferred" if self.distance > 0 else None

    @property
    def extra_log_width(self) -> float:
        """What a prediction's interval grows by on a log scale."""
        return _WIDTH_PER_E_FOLD * self.distance

    @property
    def refused(self) -> bool:
        """Too far outside for a figure to mean anything."""
        return self.distance > REFUSAL_DISTANCE


def features(operator: str, values: Mapping[str, Any]) -> dict[str, float]:
    """The numeric features of ``operator`` among a sample's shape and knobs (those that are there, positive)."""
    found: dict[str, float] = {}
    for name in _FEATURES.get(operator, ()):
        value = values.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            found[name] = float(value)
    return found


def box(rows: Iterable[Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """Feature to (lowest, highest) over ``rows``."""
    bounds: dict[str, tuple[float, float]] = {}
    for row in rows:
        for name, value in row.items():
            low, high = bounds.get(name, (value, value))
            bounds[name] = (min(low, value), max(high, value))
    return bounds


def coverage(cost: CostModel, operator: str, values: Mapping[str, Any]) -> Coverage:
    """How far ``values`` (shape and knobs of ``operator``) lie outside what ``cost`` was fitted on.

    A model that was never fitted has no box: its rates carry their own intervals, so the distance is 0 and
    ``covered`` is false.
    """
    bounds = cost.coverage.get(operator)
    if not bounds:
        return Coverage(
            False, 0.0, f"{operator} was never measured on {cost.hardware_id}: run a sweep of it there."
        )
    distance, outside = 0.0, []
    for name, value in features(operator, values).items():
        if name not in bounds:
            continue
        low, high = bounds[name]
        gap = max(0.0, math.log(low / value), math.log(value / high))
        if gap > 1e-9:
            distance += gap
            outside.append(f"{name}={value:g} (measured {low:g} to {high:g})")
    if not outside:
        return Coverage(True, 0.0, "")
    message = f"{operator}: outside what was measured: {', '.join(outside)}. Sweep it at these values."
    return Coverage(False, distance, message)
