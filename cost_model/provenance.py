"""Where a predicted number came from and how far to trust it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Provenance = Literal["measured", "interpolated", "transferred", "analytic"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its interval. ``level`` is the coverage the interval claims."""

    value: float
    low: float
    high: float
    provenance: Provenance
    level: float = 0.9
    note: str = ""

    def provenance_json(self) -> dict[str, Any]:
        """The entry a plan's ``provenance`` map holds for this value."""
        entry: dict[str, Any] = {
            "provenance": self.provenance,
            "low": self.low,
            "high": self.high,
            "level": self.level,
        }
        if self.note:
            entry["note"] = self.note
        return entry
