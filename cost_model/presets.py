"""Clusters one can name: 8-GPU HGX nodes, each figure marked with where it came from.

Datasheet figures are the vendor's for the SXM boards and for DGX systems built on them (dense bf16 rates,
NVLink per direction, two sockets, eight 400 Gb/s adapters). Measured figures for the H200 are those of
``cost_model/reference``; memory sizes are what the framework sees as total device memory, for H100 and B200 as
its out-of-memory messages print it in public reports. What is neither is marked ``assumed``.
"""

from __future__ import annotations

from collections.abc import Callable

from cost_model.cluster_spec import ClusterSpec, Figure, GpuSpec, HostSpec, LinkTier
from cost_model.errors import RuleError

GIB = 2.0**30
GB_PER_S = 1e9
HGX_GPUS = 8
RAM_BYTES = Figure(2e12, "assumed")
"""DGX systems ship with 2 TB; an HGX board comes in servers of any size."""

NIC = LinkTier("cluster", "400G-x8", Figure(5e-6, "assumed"), Figure(50 * GB_PER_S, "datasheet"))
"""Eight 400 Gb/s adapters a node, one per GPU."""


def _host(cpu_name: str, link: tuple[tuple[int, Figure], ...], cores: int) -> HostSpec:
    # One node's fused CPU AdamW with its transfers: 1.6e9 parameters took 0.676 s on 16 cores, and memory
    # bandwidth, not cores, is the limit beyond: two sockets count as twice that machine.
    rate = Figure(2 * 1.6e9 / 0.676, "assumed")
    return HostSpec(RAM_BYTES, cores, cpu_name, link, rate)


def _hgx_h200(nodes: int) -> ClusterSpec:
    return ClusterSpec(
        name="hgx-h200",
        nodes=nodes,
        gpus_per_node=HGX_GPUS,
        gpu=GpuSpec(
            name="NVIDIA H200",
            device="cuda",
            compute_capability="9.0",
            sm_count=132,
            hbm_bytes=Figure(139.8 * GIB, "measured"),
            peak_flops=Figure(763e12, "measured"),
            hbm_bandwidth_bytes_per_s=Figure(4.8e12, "datasheet"),
        ),
        host=_host(
            "2x Intel Xeon Platinum 8480C",
            (
                (1, Figure(50 * GB_PER_S, "measured")),
                (2, Figure(32 * GB_PER_S, "measured")),
                # The paper's eight GPUs together drew about this much, each way and GPU.
                (8, Figure(16 * GB_PER_S, "assumed")),
            ),
            112,
        ),
        tiers=(
            LinkTier("node", "nvlink4", Figure(30e-6, "measured"), Figure(330 * GB_PER_S, "measured")),
            NIC,
        ),
    )


def _hgx_h100(nodes: int) -> ClusterSpec:
    return ClusterSpec(
        name="hgx-h100",
        nodes=nodes,
        gpus_per_node=HGX_GPUS,
        gpu=GpuSpec(
            name="NVIDIA H100 80GB HBM3",
            device="cuda",
            compute_capability="9.0",
            sm_count=132,
            hbm_bytes=Figure(79.1 * GIB, "measured"),
            peak_flops=Figure(989e12, "datasheet"),
            hbm_bandwidth_bytes_per_s=Figure(3.35e12, "datasheet"),
        ),
        host=_host(
            "2x Intel Xeon Platinum 8480C",
            ((1, Figure(50 * GB_PER_S, "assumed")), (8, Figure(16 * GB_PER_S, "assumed"))),
            112,
        ),
        tiers=(
            LinkTier("node", "nvlink4", Figure(30e-6, "assumed"), Figure(450 * GB_PER_S, "datasheet")),
            NIC,
        ),
    )


def _hgx_b200(nodes: int) -> ClusterSpec:
    return ClusterSpec(
        name="hgx-b200",
        nodes=nodes,
        gpus_per_node=HGX_GPUS,
        gpu=GpuSpec(
            name="NVIDIA B200",
            device="cuda",
            compute_capability="10.0",
            sm_count=148,
            hbm_bytes=Figure(178.35 * GIB, "measured"),
            peak_flops=Figure(2.25e15, "datasheet"),
            hbm_bandwidth_bytes_per_s=Figure(8e12, "datasheet"),
        ),
        host=_host(
            "2x Intel Xeon Platinum 8570",
            ((1, Figure(50 * GB_PER_S, "assumed")), (8, Figure(16 * GB_PER_S, "assumed"))),
            112,
        ),
        tiers=(
            LinkTier("node", "nvlink5", Figure(30e-6, "assumed"), Figure(900 * GB_PER_S, "datasheet")),
            NIC,
        ),
    )


_PRESETS: dict[str, Callable[[int], ClusterSpec]] = {
    "hgx-h200": _hgx_h200,
    "hgx-h100": _hgx_h100,
    "hgx-b200": _hgx_b200,
}

PRESET_NAMES = tuple(_PRESETS)


def preset(name: str, nodes: int = 1) -> ClusterSpec:
    """A named cluster of ``nodes`` nodes.

    Raises:
        RuleError: no such preset, or fewer than one node.
    """
    build = _PRESETS.get(name) if isinstance(name, str) else None
    if build is None:
        raise RuleError(
            rule="a cluster is a preset's name or a cluster file",
            value=name,
            remedy=f"Presets are {', '.join(PRESET_NAMES)}; anything else must be a YAML or JSON file.",
        )
    if isinstance(nodes, bool) or not isinstance(nodes, int) or not 1 <= nodes <= 2**16:
        raise RuleError(
            rule="nodes must be a whole number from 1 to 65536", value=nodes, remedy="Use 1 for one node."
        )
    return build(nodes)
