"""The cost model that a sweep starts from, when nobody has fitted one for its hardware."""

from __future__ import annotations

import re
from dataclasses import replace

from cost_model.cluster_spec import ClusterSpec, Figure, GpuSpec, HostSpec, LinkTier
from cost_model.presets import PRESET_NAMES, preset
from cost_model.rates import CostModel
from cost_model.rates_default import default_cost_model
from cost_model.reference.machines import MACHINES

# A core of a server of these years: fp32 matmul, memory, what a process gets through a loopback link, and through
# a network of 2 Gbit/s, between the slowest and the fastest there are.
_CORE_FLOPS, _CORES = 3e10, 4
_RAM_BYTES_PER_S, _LINK_BYTES_PER_S, _NETWORK_BYTES_PER_S = 1e10, 2e9, 2.5e8
_ADAM_PARAMS_PER_S = 2e8


def prior_for(hardware_id: str) -> CostModel:
    """Rates to start from on hardware of this fingerprint.

    A machine that reference measurements ship for: its own. Another one with a card of a known kind (its name is
    part of the fingerprint): that card's, carried over. Anything else: a processor of these years, by guess. A
    sweep weighs all of them against its own rows, so a poor guess costs trials, not the answer.
    """
    for machine in MACHINES:
        if machine.hardware_id == hardware_id:
            return default_cost_model(machine)
    words = re.split(r"[^a-z0-9]+", hardware_id.lower())
    for name in PRESET_NAMES:
        if name.rsplit("-", maxsplit=1)[-1] in words:
            return replace(default_cost_model(preset(name)), hardware_id=hardware_id)
    return replace(default_cost_model(_some_processor()), hardware_id=hardware_id)


def _some_processor() -> ClusterSpec:
    def guess(value: float) -> Figure:
        return Figure(value, "assumed")

    return ClusterSpec(
        name="processor",
        nodes=1,
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
