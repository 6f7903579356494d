"""Sweep rows drawn from a cost model whose constants are known."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from cost_model.rates import CostModel, RateView
from cost_model.sample_formulas import sample_seconds

RANKS = 4
_PASSES = {
    "pipelined_llep": ("forward", "backward"),
    "ring_dtp": ("forward", "backward"),
    "checkpoint_offload": ("forward", "backward"),
    "stream_adamw": ("step",),
}


def grid(**axes: Iterable[Any]) -> list[dict[str, Any]]:
    """Every combination of the axes' values."""
    names = list(axes)
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*axes.values())]


def cases(operator: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(shapes, configurations) of a small sweep."""
    if operator == "pipelined_llep":
        fixed = {"hidden": 256, "intermediate": 512, "experts": 16, "top_k": 4, "dtype": "float32"}
        shapes = [{"tokens_per_rank": n, "profile": "balanced", **fixed} for n in (512, 2048, 8192)]
        return shapes, grid(chunks=[1, 2, 4, 8], dispatch_schedule=["serial", "prefetch"])
    if operator == "ring_dtp":
        shapes = [
            {"tokens_per_rank": n, "hidden": 256, "vocab": v, "dtype": "float32"}
            for n, v in ((512, 4096), (2048, 8192))
        ]
        return shapes, grid(ring_mode=["weights", "activations"], strip_rows=[64, 128, 256, 512])
    if operator == "checkpoint_offload":
        shapes = [
            {"tokens_per_rank": n, "hidden": 256, "boundaries": 8, "dtype": "float32"} for n in (1024, 4096)
        ]
        return shapes, grid(host_budget_bytes=[0, 2 << 20, 8 << 20, 1 << 30])
    return [{"params": 4_000_000, "dtype": "float32"}], grid(
        bucket_params=[100_000, 500_000, 2_000_000],
        staging_slots=[2, 3],
        engine=["stream", "host"],
        host_share=[0.0],
    )


def rows(
    truth: CostModel,
    operator: str,
    *,
    noise: float = 0.02,
    repeats: int = 3,
    seed: int = 0,
    hardware_id: str | None = None,
    shapes: list[dict[str, Any]] | None = None,
) -> pd.DataFrame:
    """One row per rank and repeat; the slowest rank's seconds are the formula's times log-normal noise."""
    generator = np.random.default_rng(seed)
    own_shapes, configs = cases(operator)
    found: list[dict[str, Any]] = []
    for shape, config in itertools.product(shapes or own_shapes, configs):
        for name in _PASSES[operator]:
            seconds = seconds_of(truth, operator, shape, config, name)
            for repeat in range(repeats):
                slowest = seconds * float(np.exp(noise * generator.standard_normal()))
                row = {
                    "operator": operator,
                    "provider": "flatpeak",
                    "shape_json": json.dumps(shape, sort_keys=True),
                    "config_json": json.dumps(config, sort_keys=True),
                    "pass": name,
                    "repeat": repeat,
                    "allocated_bytes": 0,
                    "reserved_bytes": 0,
                    "peak_source": "tracked",
                    "hardware_id": hardware_id or truth.hardware_id,
                    "commit": "",
                }
                found += [
                    {**row, "rank": rank, "seconds": slowest * (1.0 - 0.01 * rank)} for rank in range(RANKS)
                ]
    return pd.DataFrame(found)


def seconds_of(
    truth: CostModel, operator: str, shape: Mapping[str, Any], config: Mapping[str, Any], name: str
) -> float:
    """The truth's seconds of one configuration."""
    values = {**shape, **config, "ranks": RANKS, "scalar_bytes": 4}
    return sample_seconds(RateView(truth.rates), operator, values, name)
