"""What a cluster's wiring means for a launch: groups that reach past the closest links or past one leaf switch."""

from __future__ import annotations

from cost_model.cluster_spec import ClusterSpec
from cost_model.launch import LaunchConfig
from cost_model.topology import Fabric, NodeTopology, distance

_GROUPS = (("sequence_degree", "D"), ("expert_degree", "E_p"), ("vocab_degree", "P"))


def topology_remarks(cluster: ClusterSpec, launch: LaunchConfig) -> list[str]:
    """Remarks on the launch's groups (contiguous ranks, node by node), and the notes of whoever measured.

    A tier has one rate, that of its slowest link: where a group need not use that link, the plan is careful; where
    it must, the plan is right, and a smaller group may be faster.
    """
    remarks = list(cluster.notes)
    topology = cluster.topology
    if topology is None:
        return remarks
    for name, symbol in _GROUPS:
        degree = int(getattr(launch, name))
        if degree < 2:
            continue
        if topology.node is not None and (text := _inside(topology.node, degree)):
            remarks.append(f"{name}: groups of {symbol} = {degree} {text}")
        if topology.fabric is not None and (text := _between(topology.fabric, cluster, degree)):
            remarks.append(f"{name}: groups of {symbol} = {degree} {text}")
    return remarks


def _inside(node: NodeTopology, degree: int) -> str | None:
    """How the cards of a group within a node are joined, when not by the node's closest links throughout."""
    size = min(degree, node.cards)
    groups = [range(first, first + size) for first in range(0, node.cards - size + 1, size)]
    kinds = {node.link_kind(a, b) for group in groups for a in group for b in group if a < b}
    if not kinds or len(node.kinds) < 2:
        return None
    farthest, closest = max(kinds, key=distance), next(iter(node.kinds))
    if farthest == closest:
        return f"stay on {closest}; the node's rate is that of its slowest link ({list(node.kinds)[-1]})"
    island = max(map(len, node.islands))
    return f"reach over {farthest}; {closest} joins {island} cards at most"


def _between(fabric: Fabric, cluster: ClusterSpec, degree: int) -> str | None:
    """How far up a group over several nodes must go, when no leaf holds it."""
    nodes = -(-degree // cluster.gpus_per_node)
    if nodes < 2 or (level := fabric.least_level(nodes)) == 0:
        return None
    sizes = fabric.level_sizes
    if level == len(sizes):
        return f"need {nodes} nodes; the largest switches named have {sizes[-1]} below them"
    above = "1 level" if level == 1 else f"{level} levels"
    return (
        f"span {nodes} nodes, a leaf has as few as {sizes[0]}: they cross switches {above} above the leaves"
    )
