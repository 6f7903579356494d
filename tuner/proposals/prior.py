"""The cost model that a sweep starts from, when nobody has fitted one for its hardware."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from cost_model.cluster_spec import ClusterSpec, Figure, GpuSpec, HostSpec, LinkTier
from cost_model.presets import PRESET_NAMES, preset
from cost_model.rates import CostModel
from cost_model.rates_default import default_cost_model
from cost_model.reference import load_samples
from cost_model.reference.machines import MACHINES
from cost_model.samples import Observation, observations
from tuner.routing.rows import with_routing

MOST_WARM = 48
"""Older rows that a proposal takes in."""

# A core of a server of these years: fp32 matmul, memory, what a process gets through a loopback link, and through
# a network of 2 Gbit/s, between the slowest and the fastest there are.
_CORE_FLOPS, _CORES = 3e10, 4
_RAM_BYTES_PER_S, _LINK_BYTES_PER_S, _NETWORK_BYTES_PER_S = 1e10, 2e9, 2.5e8
_ADAM_PARAMS_PER_S = 2e8


def prior_for(hardware_id: str, nodes: int = 1) -> CostModel:
    """Rates to start from on hardware of this fingerprint.

    A machine that reference measurements ship for: its own. Another one with a card of a known kind (its name is
    part of the fingerprint): that card's, carried over. Anything else: ``nodes`` processors of these years, by
    guess. A sweep weighs all of them against its own rows, so a poor guess costs trials, not the answer.
    """
    for machine in MACHINES:
        if machine.hardware_id == hardware_id:
            return default_cost_model(machine)
    words = re.split(r"[^a-z0-9]+", hardware_id.lower())
    for name in PRESET_NAMES:
        if name.rsplit("-", maxsplit=1)[-1] in words:
            return replace(default_cost_model(preset(name)), hardware_id=hardware_id)
    return replace(default_cost_model(_some_processor(nodes)), hardware_id=hardware_id)


def shipped_rows(operator: str, version: int, hardware_id: str) -> pd.DataFrame:
    """Reference rows of an operator's version on hardware of this fingerprint."""
    rows = load_samples()
    return rows[
        (rows["operator"] == operator)
        & (rows["hardware_id"] == hardware_id)
        & (rows["operator_version"] == version)
    ]


def shipped_for_others(
    operator: str, version: int, hardware_id: str, shape: Mapping[str, Any]
) -> tuple[Observation, ...]:
    """What shipped rows tell of a shape that is not among them: those of other shapes, the nearest first.

    Args:
        shape: with ``ranks``.
    """
    rows = shipped_rows(operator, version, hardware_id)
    if rows.empty:
        return ()
    found, _ = observations(with_routing(rows), hardware_id)
    return tuple(one for one in nearest(found, shape) if unlike(one, shape))[:MOST_WARM]


def nearest(found: Iterable[Observation], shape: Mapping[str, Any]) -> list[Observation]:
    """Observations of the likest shapes first."""
    return sorted(found, key=lambda one: unlike(one, shape))


def unlike(one: Observation, shape: Mapping[str, Any]) -> float:
    """How far an observation's shape lies from this one: ratios of sizes as logarithms, 1 for another word."""
    return sum(_apart(one.values.get(key), value) for key, value in shape.items())


def _apart(one: Any, other: Any) -> float:
    if one == other:
        return 0.0
    sizes = [v for v in (one, other) if isinstance(v, int | float) and not isinstance(v, bool) and v > 0]
    return abs(math.log(sizes[0] / sizes[1])) if len(sizes) == 2 else 1.0


def _some_processor(nodes: int) -> ClusterSpec:
    def guess(value: float) -> Figure:
        return Figure(value, "assumed")

    return ClusterSpec(
        name="processor",
        nodes=nodes,
        gpus_per_node=1,
        gpu=GpuSpec(
            name="processor",
            device="cpu",
            compute_capability="",
            sm_count=_CORES,
            hbm_bytes=guess(2.0**34),
            peak_flops=guess(_CORE_FLOPS * _CORES),
            hbm_bandwidth_bytes_per_s=guess(_RAM_BYTES_PER_S),
        ),
        host=HostSpec(
            ram_bytes=guess(2.0**34),
            cores=_CORES,
            cpu_name="",
            link_bytes_per_s=((1, guess(_RAM_BYTES_PER_S)),),
            cpu_adam_params_per_s=guess(_ADAM_PARAMS_PER_S),
        ),
        tiers=(
            LinkTier("node", "loopback", guess(1e-4), guess(_LINK_BYTES_PER_S)),
            LinkTier("cluster", "ethernet", guess(2e-4), guess(_NETWORK_BYTES_PER_S)),
        ),
    )
