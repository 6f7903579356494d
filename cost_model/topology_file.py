"""The ``topology`` part of a cluster file: a node's matrix of links row by row, and the switches above the nodes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from cost_model.cluster_spec import ClusterSpec
from cost_model.errors import RuleError
from cost_model.topology import (
    LINK_KIND,
    MAX_CARDS,
    MAX_HOSTS,
    MAX_LEVELS,
    MAX_NAME,
    MAX_NICS,
    MAX_NUMA_NODES,
    MAX_SWITCHES,
    SELF,
    Fabric,
    Nic,
    NodeTopology,
    Switch,
    Topology,
)

_Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Nic(_Entry):
    name: _Name
    bytes_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False, lt=1e30)] | None = None
    nearest: Annotated[list[Annotated[int, Field(ge=0, lt=MAX_CARDS)]], Field(max_length=MAX_CARDS)] = []


class _Node(_Entry):
    links: Annotated[list[str], Field(min_length=1, max_length=MAX_CARDS)]
    numa: Annotated[
        list[Annotated[int, Field(ge=0, lt=MAX_NUMA_NODES)] | None], Field(max_length=MAX_CARDS)
    ] = []
    nics: Annotated[list[_Nic], Field(max_length=MAX_NICS)] = []


class _Switch(_Entry):
    name: _Name
    nodes: Annotated[list[_Name], Field(max_length=MAX_HOSTS)] = []
    parent: _Name | None = None


class TopologyEntry(_Entry):
    """What a file says; :meth:`topology` checks that it hangs together."""

    node: _Node | None = None
    switches: Annotated[list[_Switch], Field(max_length=MAX_SWITCHES)] = []

    def topology(self) -> Topology:
        """The topology that is written there.

        Raises:
            RuleError: the matrix is not square and symmetric, or the switches form no tree.
        """
        node = None if self.node is None else _node(self.node)
        fabric = _fabric(self.switches) if self.switches else None
        return Topology(node, fabric)


def topology_to_mapping(topology: Topology) -> dict[str, Any]:
    """The mapping that :class:`TopologyEntry` reads back to an equal topology."""
    mapping: dict[str, Any] = {}
    if (node := topology.node) is not None:
        mapping["node"] = {
            "links": [" ".join(row) for row in node.links],
            "numa": list(node.numa),
            "nics": [
                {"name": nic.name, "bytes_per_s": nic.bytes_per_s, "nearest": list(nic.nearest)}
                for nic in node.nics
            ],
        }
    if topology.fabric is not None:
        mapping["switches"] = [
            {"name": one.name}
            | ({"nodes": list(one.nodes)} if one.nodes else {})
            | ({"parent": one.parent} if one.parent is not None else {})
            for one in topology.fabric.switches
        ]
    return mapping


def check_topology(cluster: ClusterSpec) -> None:
    """Refuse a topology of another cluster.

    Raises:
        RuleError: it has another number of cards than a node, or fewer nodes than the cluster.
    """
    topology = cluster.topology
    if topology is None:
        return
    if topology.node is not None and topology.node.cards != cluster.gpus_per_node:
        raise RuleError(
            rule=f"the topology of a node of {cluster.name} joins its {cluster.gpus_per_node} cards",
            value=f"{topology.node.cards} cards",
            remedy="Take it on a node of this cluster, with all its cards visible, or correct gpus_per_node.",
        )
    if topology.fabric is not None and len(topology.fabric.nodes) < cluster.nodes:
        raise RuleError(
            rule=f"the switches of {cluster.name} join its {cluster.nodes} nodes",
            value=f"{len(topology.fabric.nodes)} nodes",
            remedy="Take the topology.conf of this cluster, or correct nodes.",
        )


def _node(entry: _Node) -> NodeTopology:
    rows = tuple(tuple(row.split()) for row in entry.links)
    for a, row in enumerate(rows):
        if len(row) != len(rows) or any((kind == SELF) != (a == b) for b, kind in enumerate(row)):
            raise _wrong("topology.node.links is a square matrix with X on its diagonal", entry.links[a])
        for b, kind in enumerate(row):
            if kind != SELF and (LINK_KIND.fullmatch(kind) is None or rows[b][a : a + 1] != (kind,)):
                raise _wrong("topology.node.links gives one known kind of link a pair", f"{a} to {b}: {kind}")
    if entry.numa and len(entry.numa) != len(rows):
        raise _wrong("topology.node.numa has an entry for every card", entry.numa)
    nics = tuple(Nic(nic.name, nic.bytes_per_s, tuple(nic.nearest)) for nic in entry.nics)
    if any(card >= len(rows) for nic in nics for card in nic.nearest):
        raise _wrong("topology.node.nics names cards of the node as nearest", [nic.name for nic in nics])
    return NodeTopology(rows, tuple(entry.numa), nics)


def _fabric(entries: list[_Switch]) -> Fabric:
    switches = tuple(Switch(one.name, tuple(one.nodes), one.parent) for one in entries)
    parents = {one.name: one.parent for one in switches}
    if len(parents) < len(switches):
        raise _wrong("topology.switches describes every switch once", len(switches) - len(parents))
    nodes = [node for one in switches for node in one.nodes]
    if not nodes or len(set(nodes)) < len(nodes):
        raise _wrong("topology.switches names every node once", len(nodes))
    for name, parent in parents.items():
        above, height = parent, 0
        while above is not None:
            height += 1
            if above not in parents or height > MAX_LEVELS:
                raise _wrong(f"topology.switches form a tree of at most {MAX_LEVELS} levels", name)
            above = parents[above]
    return Fabric(switches)


def _wrong(rule: str, value: object) -> RuleError:
    return RuleError(
        rule=rule, value=value, remedy="Correct it, or import the topology anew (`flatpeak probe --help`)."
    )
