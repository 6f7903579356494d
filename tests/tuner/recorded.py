"""Recorded sweeps drawn from a known truth: rows in the samples' columns."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pandas as pd

from cost_model.rates import Rate, RateView
from cost_model.sample_formulas import sample_seconds
from tuner.proposals.prior import prior_for
from tuner.space import Config

HARDWARE = "some-processor-x1-000000000000"
HEAD = {"tokens_per_rank": 4096, "hidden": 256, "vocab": 32768, "dtype": "float32"}
DISPATCH = {
    "tokens_per_rank": 4096, "hidden": 256, "intermediate": 512, "experts": 16, "top_k": 4, "dtype": "float32",
    "profile": "balanced", "min_rows": 64,
}  # fmt: skip
RANKS = 4


def dispatch_points() -> list[Config]:
    """K × schedule: 34 points."""
    counts = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    schedules = ("serial", "prefetch", "overlap")
    return [
        {"chunks": k, "dispatch_schedule": s} for k in counts for s in schedules if k > 1 or s == "serial"
    ]


def head_points() -> list[Config]:
    """Ring mode × strip rows: 33 points."""
    modes = ("activations", "weights", "gather")
    return [{"ring_mode": m, "strip_rows": round(64 * 1.5**i)} for m in modes for i in range(11)]


def truth(seed: int) -> dict[str, Rate]:
    """Rates a factor of up to two (one standard deviation) away from what a sweep assumes at first."""
    draw = np.random.default_rng(seed)
    moved = {}
    for name, rate in sorted(prior_for(HARDWARE).rates.items()):
        value = rate.value * math.exp(0.7 * float(draw.standard_normal()))
        value = min(0.95, value) if rate.unit == "share" else value
        moved[name] = Rate(value, value, value, rate.provenance, rate.unit)
    return moved


def rows(
    operator: str,
    shape: dict[str, Any],
    points: Iterable[Config],
    *,
    seed: int = 0,
    peak: Callable[[Config], int] = lambda config: 1,
    noise: float = 0.01,
    repeats: int = 5,
) -> pd.DataFrame:
    """Seconds of the formula under hidden rates, with a deviation that no formula has, and noise."""
    view = RateView(truth(seed))
    draw = np.random.default_rng(seed + 1)
    found = []
    for config in points:
        deviation = 1.0 + 0.03 * math.sin(
            3.0 * sum(float(v) for v in config.values() if not isinstance(v, str))
        )
        for passed in ("forward", "backward"):
            values = {**shape, **config, "ranks": RANKS, "scalar_bytes": 4}
            seconds = deviation * sample_seconds(view, operator, values, passed)
            found += [
                {
                    "operator": operator,
                    "provider": "flatpeak",
                    "shape_json": json.dumps({**shape, "ranks": RANKS}, sort_keys=True),
                    "config_json": json.dumps(config, sort_keys=True),
                    "pass": passed,
                    "rank": rank,
                    "repeat": repeat,
                    "seconds": seconds * math.exp(noise * float(draw.standard_normal())),
                    "allocated_bytes": peak(config),
                    "hardware_id": HARDWARE,
                }
                for rank in range(2)
                for repeat in range(repeats)
            ]
    return pd.DataFrame(found)
