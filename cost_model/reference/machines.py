"""The machines that the shipped measurements were taken on."""

from __future__ import annotations

from dataclasses import replace

from cost_model.cluster_spec import ClusterSpec, Figure, GpuSpec, HostSpec, LinkTier

GIB = 2.0**30


def _h200(gpus: int, link_bytes_per_s: float, tiers: tuple[LinkTier, ...]) -> ClusterSpec:
    return ClusterSpec(
        name=f"reference-h200-x{gpus}",
        nodes=1,
        gpus_per_node=gpus,
        gpu=GpuSpec(
            name="NVIDIA H200",
            device="cuda",
            compute_capability="9.0",
            sm_count=132,
            hbm_bytes=Figure(139.8 * GIB, "measured"),
            peak_flops=Figure(763e12, "measured"),
            hbm_bandwidth_bytes_per_s=Figure(4.8e12, "datasheet"),
        ),
        host=HostSpec(
            ram_bytes=Figure(gpus * 128 * GIB, "stated"),
            cores=16 * gpus,
            cpu_name="",
            link_bytes_per_s=((gpus, Figure(link_bytes_per_s, "measured")),),
            cpu_adam_params_per_s=Figure(gpus * 1.6e9 / 0.676, "measured"),
        ),
        tiers=tiers,
    )


ONE_H200 = _h200(1, 50e9, ())
"""One card with 16 cores of its host."""

ONE_H200_NODE = replace(
    _h200(1, 50e9, (LinkTier("node", "single", Figure(0.0, "stated"), Figure(50e9, "stated")),)),
    name="reference-h200-x1-node",
    host=HostSpec(
        ram_bytes=Figure(128 * GIB, "stated"),
        cores=16,
        cpu_name="Intel(R) Xeon(R) Processor",
        link_bytes_per_s=((1, Figure(55.3e9, "measured")),),
        cpu_adam_params_per_s=Figure(4.3e9, "measured"),
    ),
)
"""One card of one virtual machine, as ``flatpeak probe`` sees it: operators were swept here, a rank of eight in
loopback. It has no link: the tier stands for the fingerprint's word for that."""

TWO_H200 = _h200(
    2, 32e9, (LinkTier("node", "nvlink4", Figure(30e-6, "measured"), Figure(330e9, "measured")),)
)
"""Two cards of one host."""

TWO_H200_NODE = replace(
    _h200(2, 25e9, (LinkTier("node", "NV18", Figure(85e-6, "measured"), Figure(323e9, "measured")),)),
    name="reference-h200-x2-node",
    host=HostSpec(
        ram_bytes=Figure(270334464000.0, "measured"),
        cores=32,
        cpu_name="Intel(R) Xeon(R) Processor",
        link_bytes_per_s=((1, Figure(44.4e9, "measured")), (2, Figure(25e9, "measured"))),
        cpu_adam_params_per_s=Figure(3.9e9, "measured"),
    ),
)
"""Two cards of one virtual machine, as ``flatpeak probe`` sees them: the operators themselves were swept here."""

MACHINES = (ONE_H200, ONE_H200_NODE, TWO_H200, TWO_H200_NODE)
