"""Sweep rows as observations: slowest rank per repeat, both latency modes kept apart, one median a configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from cost_model.errors import RuleError

COLUMNS = (
    "operator",
    "provider",
    "shape_json",
    "config_json",
    "pass",
    "rank",
    "repeat",
    "seconds",
    "hardware_id",
)
_SLOW_MODE = 1.12
"""The slow mode of a bimodal latency is at least this much slower (theory section 2)."""
_SEPARATION = 3.0
"""The gap between two modes against the wider one's own range."""
_SCALAR_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Observation:
    """One configuration and pass: what was run, and the seconds of its fast mode."""

    operator: str
    pass_name: str
    values: dict[str, Any]
    """Shape and knobs together, with ``ranks`` and ``scalar_bytes``."""
    seconds: float
    repeats: int
    slow_share: float
    """Share of repeats in the slow mode; 0 when there is one mode."""
    slow_seconds: float | None

    @property
    def key(self) -> str:
        """``operator:pass``."""
        return f"{self.operator}:{self.pass_name}"


def split_modes(seconds: Sequence[float]) -> tuple[list[float], list[float]]:
    """(fast, slow) repeats; slow is empty when there is one mode.

    Two modes are told from noise by a gap of at least 12 % that is also three times wider than either side's range.
    """
    ordered = sorted(seconds)
    if len(ordered) < 3:
        return ordered, []
    gaps = [(ordered[i + 1] / ordered[i], i + 1) for i in range(len(ordered) - 1)]
    ratio, cut = max(gaps)
    fast, slow = ordered[:cut], ordered[cut:]
    width = max(fast[-1] - fast[0], slow[-1] - slow[0])
    if ratio >= _SLOW_MODE and slow[0] - fast[-1] >= _SEPARATION * width:
        return fast, slow
    return ordered, []


def observations(samples: pd.DataFrame, hardware_id: str) -> tuple[list[Observation], int]:
    """Observations of our own operators on ``hardware_id``, and how many rows of other hardware were left out.

    Raises:
        RuleError: a column is missing.
    """
    missing = [name for name in COLUMNS if name not in samples.columns]
    if missing:
        raise RuleError(
            rule=f"samples have the columns {', '.join(COLUMNS)}",
            value=missing,
            remedy="Pass the rows of a sweep as they are stored.",
        )
    ours = samples[samples["provider"] == "flatpeak"]
    here = ours[ours["hardware_id"] == hardware_id]
    foreign = len(ours) - len(here)
    seconds = here["seconds"].astype(float)
    here = here[np.isfinite(seconds) & (seconds > 0)]
    found: list[Observation] = []
    for group, rows in here.groupby(["operator", "shape_json", "config_json", "pass"], sort=True):
        operator, shape, config, name = (str(part) for part in group)
        slowest = rows.groupby("repeat")["seconds"].max().astype(float)
        fast, slow = split_modes([float(value) for value in slowest])
        values: dict[str, Any] = {**json.loads(shape), **json.loads(config)}
        values.setdefault("ranks", int(rows["rank"].nunique()))
        values["scalar_bytes"] = _SCALAR_BYTES.get(str(values.get("dtype", "float32")), 4)
        found.append(
            Observation(
                operator,
                name,
                values,
                float(np.median(fast)),
                len(slowest),
                len(slow) / len(slowest),
                float(np.median(slow)) if slow else None,
            )
        )
    return found, foreign
