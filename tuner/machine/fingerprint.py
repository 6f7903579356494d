"""What a measurement was taken on: the hardware that keys it, and the software that qualifies it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import socket
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from cost_model.cluster_spec import ClusterSpec, Figure, GpuSpec, HostSpec, LinkTier
from tuner.machine.cores import usable_cores

_COMMAND_S = 10.0


@cache
def _hardware(device: str) -> dict[str, Any]:
    cuda = device == "cuda"
    found: dict[str, Any] = {
        "device": device,
        "cpu_name": _cpu_name(),
        "cores": usable_cores(),
        "ram_bytes": psutil.virtual_memory().total,
    }
    if not cuda:
        return found | {
            "gpu_name": found["cpu_name"],
            "compute_capability": platform.machine(),
            "sm_count": found["cores"],
            "hbm_bytes": found["ram_bytes"],
            "gpus_per_node": 1,
            "link_graph": "loopback",
        }
    card = torch.cuda.get_device_properties(0)
    return found | {
        "gpu_name": card.name,
        "compute_capability": f"{card.major}.{card.minor}",
        "sm_count": card.multi_processor_count,
        "hbm_bytes": card.total_memory,
        "gpus_per_node": torch.cuda.device_count(),
        "link_graph": _link_graph(),
    }


def local_hardware(device: str | None = None) -> dict[str, Any]:
    """This machine: device, gpu_name, compute_capability, sm_count, hbm_bytes, gpus_per_node, link_graph,
    cpu_name, cores (those that this process may use), ram_bytes.

    Args:
        device: ``cpu`` or ``cuda``; by default ``cuda`` where there is one. On the CPU, processor and memory
            stand where a card would; its ranks are processes, as many as one likes.
    """
    return dict(_hardware(device or ("cuda" if torch.cuda.is_available() else "cpu")))


@cache
def local_hardware_id(device: str | None = None, network: str | None = None) -> str:
    """``ClusterSpec.hardware_id`` of :func:`local_hardware`, or of nodes like this one joined by ``network``."""
    return bare_cluster(local_hardware(device), network).hardware_id


def bare_cluster(hardware: dict[str, Any], network: str | None = None) -> ClusterSpec:
    """A ClusterSpec of ``hardware`` with its identity only: rates are for a probe to measure.

    Args:
        network: name of what joins such nodes (``tuner.machine.network.network_name``): a second tier. Without it the
            node stands alone.
    """
    unknown = Figure(1.0, "assumed")
    between = () if network is None else (LinkTier("cluster", network, unknown, unknown),)
    return ClusterSpec(
        name=socket.gethostname(),
        nodes=1,
        gpus_per_node=hardware["gpus_per_node"],
        gpu=GpuSpec(
            name=hardware["gpu_name"],
            device=hardware["device"],
            compute_capability=hardware["compute_capability"],
            sm_count=hardware["sm_count"],
            hbm_bytes=Figure(float(hardware["hbm_bytes"]), "measured"),
            peak_flops=unknown,
            hbm_bandwidth_bytes_per_s=unknown,
        ),
        host=HostSpec(
            ram_bytes=Figure(float(hardware["ram_bytes"]), "measured"),
            cores=hardware["cores"],
            cpu_name=hardware["cpu_name"],
            link_bytes_per_s=((1, unknown),),
            cpu_adam_params_per_s=unknown,
        ),
        tiers=(LinkTier("node", hardware["link_graph"], unknown, unknown), *between),
    )


@cache
def _software() -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "flatpeak": _package_version(),
        "commit": commit(),
        "kernel": platform.release(),
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", ""),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
        found["driver"] = _output(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        ).splitlines()[:1]
        found["nccl_settings"] = {k: v for k, v in sorted(os.environ.items()) if k.startswith("NCCL_")}
    return found


def local_software() -> dict[str, Any]:
    """Versions and settings that move a measurement without changing what it is a measurement of."""
    return dict(_software())


def software_id(software: dict[str, Any]) -> str:
    """Short hash of :func:`local_software`."""
    return hashlib.sha256(json.dumps(software, sort_keys=True).encode()).hexdigest()[:12]


@cache
def commit() -> str:
    """The source revision that runs: ``$FLATPEAK_COMMIT``, git's, or the package's version."""
    if named := os.environ.get("FLATPEAK_COMMIT"):
        return named
    root = Path(__file__).resolve().parents[2]
    if (root / ".git").exists() and (
        revision := _output("git", "-C", str(root), "rev-parse", "HEAD").strip()
    ):
        return revision
    return _package_version()


def _package_version() -> str:
    try:
        return version("flatpeak")
    except PackageNotFoundError:
        return "unknown"


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _link_graph() -> str:
    """The kinds of link between the cards, from ``nvidia-smi topo -m``: ``NV18`` when all pairs have it."""
    matrix = _output("nvidia-smi", "topo", "-m")
    kinds = set()
    for line in matrix.splitlines():
        cells = re.sub(r"\x1b\[[0-9;]*m", "", line).split()
        if cells and re.fullmatch(r"GPU\d+", cells[0]):
            kinds |= {c for c in cells[1:] if re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS", c)}
    return "+".join(sorted(kinds)) if kinds else "single"


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
