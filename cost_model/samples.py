"""Sweep rows as observations: slowest rank per repeat, both latency modes kept apart, one median a configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from cost_model.errors import RuleError
from cost_model.sample_rules import broken_rule

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
_ONE_POINT = ("sweep_id", "hardware_id", "provider", "operator", "shape_json", "config_json")
_ONE_RUN = ("sweep_id", "trial_id", "repeat")


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


def with_ranks(samples: pd.DataFrame) -> pd.DataFrame:
    """``samples`` with a whole ``ranks`` in every row: the size of the group that the operator talked through.

    It is the shape's own where the shape has it (a group over several nodes, or in loopback), else the column's, else
    as many ranks as the sweep has rows of at this point. Without ``sweep_id`` and ``ranks``, two sweeps of one shape
    over different groups cannot be told apart. It is 0 where the row's own figure is none.
    """
    told = {text: _own_ranks(text) for text in samples["shape_json"].unique()}
    point = [name for name in _ONE_POINT if name in samples.columns]
    counted = samples.groupby(point, dropna=False)["rank"].transform("nunique")
    column = samples["ranks"] if "ranks" in samples.columns else [None] * len(samples)
    found = []
    for text, given, count in zip(samples["shape_json"], column, counted, strict=True):
        own = told[text]
        if own is None:
            own = int(count) if pd.isna(given) else _whole(given)
        found.append(own)
    return samples.assign(ranks=np.array(found, dtype=np.int64))


def _own_ranks(shape: str) -> int | None:
    found = _object(shape)
    return _whole(found["ranks"]) if "ranks" in found else None


def _whole(value: object) -> int:
    """A number of ranks, or 0 where ``value`` is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return 0
    return int(value) if math.isfinite(value) and value >= 1 and value == int(value) else 0


def slowest(rows: pd.DataFrame) -> list[float]:
    """Seconds of the slowest rank, repeat by repeat; repeats of two trials are not one another's."""
    run = [name for name in _ONE_RUN if name in rows.columns]
    return [float(seconds) for seconds in rows.groupby(run, dropna=False)["seconds"].max()]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a table of samples holds of one kind of hardware."""

    rows: tuple[Observation, ...]
    foreign: int
    """Rows of other hardware: left out."""
    strange: int
    """Rows that no group can have taken: left out."""
    strangest: str
    """What is wrong with the first of them."""


def observations(samples: pd.DataFrame, hardware_id: str) -> tuple[list[Observation], int]:
    """Observations of our own operators on ``hardware_id``, and how many rows of other hardware were left out.

    Raises:
        RuleError: a column is missing.
    """
    found = read_samples(samples, hardware_id)
    return list(found.rows), found.foreign


def read_samples(samples: pd.DataFrame, hardware_id: str) -> Reading:
    """Observations of our own operators on ``hardware_id``, with what was left out and why.

    A row whose shape or knobs break :func:`cost_model.sample_rules.broken_rule` is left out, and so is one whose JSON
    is none.

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
    strange, strangest = 0, ""
    here = with_ranks(here)
    for group, rows in here.groupby(["operator", "shape_json", "config_json", "ranks", "pass"], sort=True):
        operator, shape, config, ranks, name = (str(part) for part in group)
        values: dict[str, Any] = {**_object(shape), **_object(config), "ranks": int(ranks)}
        if (rule := broken_rule(operator, values)) is not None:
            strangest = strangest or f"{operator} with {rule}"
            strange += len(rows)
            continue
        times = slowest(rows)
        fast, slow = split_modes(times)
        values["scalar_bytes"] = _SCALAR_BYTES.get(str(values.get("dtype", "float32")), 4)
        found.append(
            Observation(
                operator,
                name,
                values,
                float(np.median(fast)),
                len(times),
                len(slow) / len(times),
                float(np.median(slow)) if slow else None,
            )
        )
    return Reading(tuple(found), foreign, strange, strangest)


def _object(text: str) -> dict[str, Any]:
    """A JSON object; where ``text`` is none, one that lacks everything."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
