"""How a cluster is wired: links between the cards of a node, network cards, and the switches above the nodes."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

MAX_CARDS = 256
MAX_NICS = 1024
MAX_NUMA_NODES = 4096
MAX_HOSTS = 65_536
MAX_SWITCHES = 65_536
MAX_LEVELS = 32
MAX_NAME = 256
"""Limits of what a topology may hold, wherever it is read from."""

SELF = "X"
_PCI_KINDS = ("PIX", "PXB", "PHB", "NODE", "SYS")
_NVLINK = re.compile(r"NV(\d+)", re.ASCII)
MAX_NVLINKS = 999
LINK_KIND = re.compile(r"NV\d{1,3}|PIX|PXB|PHB|NODE|SYS|SOC", re.ASCII)
"""``NV#``: # bonded NVLinks; then PCIe, ever further apart: one switch, several, the host bridge, the NUMA node's
bridges, the link between sockets (``SOC`` is its old name)."""


def distance(kind: str) -> int:
    """Orders link kinds: the smaller, the closer. More NVLinks are closer than fewer, any closer than PCIe."""
    if found := _NVLINK.fullmatch(kind):
        return -int(found.group(1))
    if kind == "SOC":
        kind = "SYS"
    return 1 + _PCI_KINDS.index(kind)


@dataclass(frozen=True, slots=True)
class Nic:
    """A network card of a node.

    Attributes:
        nearest: cards that reach it over its shortest path, by index.
    """

    name: str
    bytes_per_s: float | None = None
    nearest: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeTopology:
    """One node's inside.

    Attributes:
        links: kind of link of every pair of cards, square and symmetric, ``X`` on the diagonal.
        numa: NUMA node of every card, None where unknown; may be empty.
    """

    links: tuple[tuple[str, ...], ...]
    numa: tuple[int | None, ...] = ()
    nics: tuple[Nic, ...] = ()

    @property
    def cards(self) -> int:
        return len(self.links)

    def link_kind(self, first: int, second: int) -> str:
        """Kind of link between two cards, by index; ``X`` of a card with itself."""
        return self.links[first][second]

    @property
    def kinds(self) -> dict[str, int]:
        """How many pairs of cards each kind of link joins, closest kind first."""
        pairs = Counter(self.links[a][b] for a in range(self.cards) for b in range(a + 1, self.cards))
        return {kind: pairs[kind] for kind in sorted(pairs, key=distance)}

    @property
    def islands(self) -> tuple[tuple[int, ...], ...]:
        """Cards that reach each other over the node's closest kind of link; one island when all pairs do."""
        if self.cards < 2:
            return (tuple(range(self.cards)),)
        closest = next(iter(self.kinds))
        left, found = set(range(self.cards)), []
        while left:
            island, edge = set[int](), {min(left)}
            while edge:
                island |= edge
                edge = {b for a in edge for b in left - island if self.links[a][b] == closest}
            left -= island
            found.append(tuple(sorted(island)))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Switch:
    """A switch, or a block of nodes. ``nodes`` hang on it directly; ``parent`` is the switch above, by name."""

    name: str
    nodes: tuple[str, ...] = ()
    parent: str | None = None


@dataclass(frozen=True)
class Fabric:
    """Switches above the nodes, as a tree (or several trees)."""

    switches: tuple[Switch, ...]

    @cached_property
    def _by_name(self) -> dict[str, Switch]:
        return {switch.name: switch for switch in self.switches}

    @cached_property
    def _leaf_of(self) -> dict[str, str]:
        return {node: switch.name for switch in self.switches for node in switch.nodes}

    @property
    def nodes(self) -> tuple[str, ...]:
        """Every node, leaf by leaf."""
        return tuple(node for switch in self.switches for node in switch.nodes)

    @property
    def leaves(self) -> tuple[Switch, ...]:
        """Switches with nodes of their own."""
        return tuple(switch for switch in self.switches if switch.nodes)

    def path(self, node: str) -> tuple[str, ...]:
        """Switches above a node, leaf first; empty when the fabric does not hold it."""
        found = []
        name = self._leaf_of.get(node)
        while name is not None and name not in found:
            found.append(name)
            name = self._by_name[name].parent
        return tuple(found)

    def levels_apart(self, first: str, second: str) -> int | None:
        """0 for two nodes on one leaf, 1 when their leaves share a switch, and so on; None without a common one."""
        above = self.path(second)
        return next((level for level, name in enumerate(self.path(first)) if name in above), None)

    @cached_property
    def level_sizes(self) -> tuple[int, ...]:
        """Fewest nodes under one switch, level by level from the leaves up."""
        under: Counter[str] = Counter()
        level: dict[str, int] = {}
        for leaf in self.leaves:
            for height, name in enumerate(self.path(leaf.nodes[0])):
                under[name] += len(leaf.nodes)
                level[name] = max(level.get(name, 0), height)
        sizes: dict[int, int] = {}
        for name, height in level.items():
            sizes[height] = min(sizes.get(height, under[name]), under[name])
        return tuple(sizes[height] for height in sorted(sizes))

    def least_level(self, nodes: int) -> int:
        """Lowest level at which every switch holds so many nodes: 0 when they fit on any leaf."""
        fitting = (level for level, size in enumerate(self.level_sizes) if size >= nodes)
        return next(fitting, len(self.level_sizes))


@dataclass(frozen=True, slots=True)
class Topology:
    """What is known of a cluster's wiring; its nodes are alike inside."""

    node: NodeTopology | None = None
    fabric: Fabric | None = None
