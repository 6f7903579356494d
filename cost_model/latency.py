"""Links and pipelines: the pieces every latency formula of theory section 7 is built from.

Each function takes a ``RateView`` first and returns seconds; sizes may be numbers or numpy arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from cost_model.cluster_spec import ClusterSpec
from cost_model.rates import RateView

Number = float | npt.NDArray[np.float64]
Scope = Literal["node", "cluster"]
RAMP = 8.0
"""Sharpness of the bend between a matmul bound by its weights' bytes and one bound by its arithmetic."""


@dataclass(frozen=True, slots=True)
class GroupLinks:
    """What one rank of a group sends where: the shares of its bytes that leave it, by tier.

    Groups are contiguous ranks, node by node, so a group of g lies inside a node when g divides the node. Where no
    share leaves a rank of a larger group (loopback), what would travel is copied in its own memory.
    """

    size: int
    node_share: float
    cluster_share: float

    @staticmethod
    def of(cluster: ClusterSpec, size: int) -> GroupLinks:
        """The links of a contiguous group of ``size`` ranks."""
        if size <= 1:
            return GroupLinks(size, 0.0, 0.0)
        per_node = cluster.gpus_per_node
        if size <= per_node and per_node % size == 0:
            inside = size
        elif size % per_node == 0:
            inside = per_node
        else:
            inside = max(1, min(size, per_node) // 2)
        return GroupLinks(size, (inside - 1) / size, (size - inside) / size)

    @staticmethod
    def strided(cluster: ClusterSpec, size: int, stride: int) -> GroupLinks:
        """The links among ``size`` replicas that lie ``stride`` ranks apart."""
        if size <= 1:
            return GroupLinks(size, 0.0, 0.0)
        inside = min(size, max(1, cluster.gpus_per_node // stride))
        return GroupLinks(size, (inside - 1) / size, (size - inside) / size)

    @property
    def absent(self) -> bool:
        """Whether there are no links: a group of one, or one rank in loopback."""
        return self.node_share <= 0 and self.cluster_share <= 0

    @property
    def nodes(self) -> int:
        """Nodes that the group spans."""
        inside = round(self.node_share * self.size) + 1
        return self.size // inside if self.cluster_share > 0 else 1

    @property
    def slowest(self) -> Scope:
        """Tier of the slowest hop of a ring through the group."""
        return "cluster" if self.cluster_share > 0 else "node"


def all_to_all_seconds(rates: RateView, links: GroupLinks, sent_bytes: Number) -> Number:
    """One all-to-all in which a rank emits ``sent_bytes`` in total (its own part included): max over tiers."""
    if links.absent:
        return _copied_seconds(rates, links, sent_bytes)
    time: Number = 0.0 * sent_bytes
    for scope, share in (("node", links.node_share), ("cluster", links.cluster_share)):
        if share > 0:
            tier = (
                rates[f"all_to_all_{scope}_alpha_s"]
                + sent_bytes * share / rates[f"all_to_all_{scope}_bytes_per_s"]
            )
            time = np.maximum(time, tier)
    return time


def _copied_seconds(rates: RateView, links: GroupLinks, moved_bytes: Number) -> Number:
    """Nothing moves in a group of one; in loopback bytes are read and written where they lie."""
    passes = 0.0 if links.size <= 1 else 2.0
    return passes * moved_bytes / rates["hbm_bytes_per_s"]


def ring_hop_seconds(rates: RateView, links: GroupLinks, hop_bytes: Number) -> Number:
    """One neighbour exchange of ``hop_bytes``, at the pace of the ring's slowest link."""
    if links.absent:
        return _copied_seconds(rates, links, hop_bytes)
    scope = links.slowest
    return rates[f"ring_{scope}_alpha_s"] + hop_bytes / rates[f"ring_{scope}_bytes_per_s"]


def gather_seconds(rates: RateView, links: GroupLinks, whole_bytes: Number) -> Number:
    """All-gather to, or reduce-scatter from, ``whole_bytes`` on every rank of the group (ring algorithm).

    A group over several nodes moves whole / gpus-in-node over the slow tier per card when the library runs one
    ring per card, so each tier carries its own share of the peers, and the slower tier decides.
    """
    if links.absent:
        return _copied_seconds(rates, links, whole_bytes)
    node = (
        rates["ring_node_alpha_s"] + whole_bytes * links.node_share / rates["ring_node_bytes_per_s"]
        if links.node_share > 0
        else 0.0 * whole_bytes
    )
    if links.cluster_share <= 0:
        return node
    cluster = (
        rates["ring_cluster_alpha_s"] + whole_bytes * links.cluster_share / rates["ring_cluster_bytes_per_s"]
    )
    return np.maximum(node, cluster)


def overlapped_seconds(first: Number, second: Number, overlap: float) -> Number:
    """Two activities at once: the longer one plus what the overlap factor eta leaves of the shorter one."""
    return np.maximum(first, second) + (1.0 - overlap) * np.minimum(first, second)


def expert_matmul_seconds(
    rates: RateView,
    rows: Number,
    local_experts: float,
    hidden: int,
    intermediate: int,
    *,
    flops_factor: float,
) -> Number:
    """Grouped matmul of ``rows`` routed rows over ``local_experts``.

    Per expert t0 + flops_factor*H*I*rows/F(rows), F(rows) = ceiling * (1 + (half_rows/rows)^8)^(-1/8): below
    ``half_rows`` an expert's time is that of reading its weights, above it that of its arithmetic.

    Args:
        flops_factor: 6 forward (three matmuls), 16 backward (two recomputed, six more).
    """
    per_expert = np.maximum(np.asarray(rows, dtype=np.float64) / local_experts, 1e-9)
    effective: Number = (per_expert**RAMP + rates["gemm_half_rows"] ** RAMP) ** (1.0 / RAMP)
    matmuls = flops_factor / 6.0
    busy = flops_factor * hidden * intermediate * effective / rates["gemm_ceiling_flops"]
    seconds: Number = local_experts * (matmuls * rates["expert_t0_s"] + busy)
    return seconds


def dense_seconds(rates: RateView, flops: Number) -> Number:
    """Large dense matmuls."""
    return flops / rates["dense_flops"]


def host_link_bytes_per_s(rates: RateView, active: int) -> float:
    """Each-way rate of one card's host link with ``active`` cards of the node using theirs.

    Takes the entry for the fewest active cards that are at least ``active`` (DRAM is shared: more cards, less each);
    beyond the last entry the total stays what it was there.
    """
    known = sorted(
        int(name.split("_")[2])
        for name in rates.names()
        if name.startswith("host_link_") and name[10:11].isdigit()
    )
    for count in known:
        if count >= active:
            return rates[f"host_link_{count}_bytes_per_s"]
    last = known[-1]
    return rates[f"host_link_{last}_bytes_per_s"] * last / active
