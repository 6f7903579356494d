"""What a cluster is: cards, hosts and the links between them, each figure with where it came from."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Literal

from cost_model.topology import Topology

FigureSource = Literal["datasheet", "measured", "assumed", "stated"]
Scope = Literal["node", "cluster"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A number and its source: ``datasheet``, ``measured``, ``assumed`` or ``stated`` (by the user)."""

    value: float
    source: FigureSource = "stated"


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One card (or one CPU rank's share of a machine, ``device='cpu'``)."""

    name: str
    device: Literal["cuda", "cpu"]
    compute_capability: str
    sm_count: int
    hbm_bytes: Figure
    peak_flops: Figure
    """Dense bf16 matrix rate, FLOP/s (on CPU: the measured fp32 rate)."""
    hbm_bandwidth_bytes_per_s: Figure


@dataclass(frozen=True, slots=True)
class HostSpec:
    """One node's host side. ``link`` rates are per GPU and per direction with both directions busy."""

    ram_bytes: Figure
    cores: int
    cpu_name: str
    link_bytes_per_s: tuple[tuple[int, Figure], ...]
    """(active GPUs on the node, bytes/s each way per GPU), rising in the first; DRAM is shared, so it falls."""
    cpu_adam_params_per_s: Figure
    """Fused CPU AdamW with its transfers, parameters per second for the whole node."""


@dataclass(frozen=True, slots=True)
class LinkTier:
    """One tier of the interconnect as one GPU sees it, bandwidth per direction."""

    scope: Scope
    name: str
    latency_s: Figure
    bandwidth_bytes_per_s: Figure


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """A homogeneous cluster: ``nodes`` nodes of ``gpus_per_node`` cards."""

    name: str
    nodes: int
    gpus_per_node: int
    gpu: GpuSpec
    host: HostSpec
    tiers: tuple[LinkTier, ...]
    max_chunk_tokens: int | None = None
    """A fabric's own cap on c (some dispatchers address at most 65,535 = 3*tokens + 1 rows)."""
    outside_allocator_bytes: Figure = field(default=Figure(3.0 * 2**30, "assumed"))
    """CUDA context, NCCL and library workspaces: what the allocator never sees."""
    allocator_slack_fraction: Figure = field(default=Figure(0.06, "assumed"))
    """Reserved minus allocated, as a share of the allocated peak."""
    topology: Topology | None = None
    """How it is wired, where that is known; no part of the fingerprint (tiers are)."""
    notes: tuple[str, ...] = ()
    """What whoever measured it wants said: a node slower than its like, say."""

    @property
    def world_size(self) -> int:
        """W: ranks in total."""
        return self.nodes * self.gpus_per_node

    @property
    def hardware_id(self) -> str:
        """Fingerprint a measurement is keyed by: a mismatch in any part is a miss, never a silent reuse.

        It names the kind of node and its links, not how many nodes there are or what was measured on them.
        On a CPU a rank is a process: how many there are, and what share of the memory each has, is a choice.
        """
        card_gib, cards = round(self.gpu.hbm_bytes.value / 2**30), self.gpus_per_node
        if self.gpu.device == "cpu":
            card_gib, cards = 0, 1
        parts = {
            "gpu": self.gpu.name,
            "capability": self.gpu.compute_capability,
            "sm": self.gpu.sm_count,
            "hbm_gib": card_gib,
            "gpus_per_node": cards,
            "links": [(t.scope, t.name) for t in self.tiers],
            "host": [self.host.cpu_name, self.host.cores],
        }
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
        slug = "".join(ch if ch.isalnum() else "-" for ch in self.gpu.name.lower()).strip("-")
        return f"{slug}-x{cards}-{digest}"
