"""Nodes and links side by side: what each reached, and which is slower than its like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

SLOWER = 0.10
"""A node is slow when it lies further below its like than this, beyond the spread of the repeats."""
_MOST_SPREAD = 0.25
_NAMES = {
    "gemm_flops": "matrix rate",
    "memory_bytes_per_s": "memory rate",
    "host_link_bytes_per_s": "host link",
    "adam_params_per_s": "AdamW on the host",
    "node_link_bytes_per_s": "links inside the node",
    "network_bytes_per_s": "network",
}


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """One node, by its slowest rank, with all ranks of the gang busy.

    Attributes:
        kind: ``ClusterSpec.hardware_id`` of the node alone: only nodes of one kind are compared.
        rates: by figure; one that was not measured is absent.
        spread: relative width of the repeats of each figure.
    """

    name: str
    kind: str
    rates: Mapping[str, float]
    spread: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """One link of the matrix, by its slowest rank: two cards of a node (``tier`` node) or two nodes (cluster).

    Attributes:
        bytes_per_s: of one rank, each way at once.
        levels: switches' levels that it crosses, 0 below one leaf; None where that is not known.
    """

    tier: str
    first: str
    second: str
    latency_s: float
    bytes_per_s: float
    spread: float = 0.0
    levels: int | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """A node, a card or a link that lies below what is typical of its like."""

    what: str
    figure: str
    value: float
    typical: float

    @property
    def below(self) -> float:
        """Share by which it lies below."""
        return 1.0 - self.value / self.typical

    def __str__(self) -> str:
        name = _NAMES.get(self.figure, self.figure)
        figures = f"{_text(self.figure, self.value)} against {_text(self.figure, self.typical)}"
        return f"{self.what}: {name} {100 * self.below:.0f} % below its like ({figures})"


def slow_nodes(nodes: Sequence[NodeFigures]) -> list[Difference]:
    """Figures in which a node lies below the median of the other nodes of its kind, worst first."""
    found: list[Difference] = []
    for kind in dict.fromkeys(node.kind for node in nodes):
        like = [node for node in nodes if node.kind == kind]
        for figure in dict.fromkeys(name for node in like for name in node.rates):
            having = [node for node in like if figure in node.rates]
            spread = min(_MOST_SPREAD, median(node.spread.get(figure, 0.0) for node in having))
            values = [(f"node {node.name}", node.rates[figure]) for node in having]
            found += below_their_like(figure, values, spread)
    return sorted(found, key=lambda one: -one.below)


def slow_links(links: Sequence[LinkFigures]) -> list[Difference]:
    """Links that lie below the median of the other links of their tier and level, worst first."""
    found: list[Difference] = []
    for tier, levels in dict.fromkeys((link.tier, link.levels) for link in links):
        like = [link for link in links if (link.tier, link.levels) == (tier, levels)]
        if len(like) > 2:  # of two, nobody knows which is right
            spread = min(_MOST_SPREAD, median(link.spread for link in like))
            values = [(f"link {link.first} – {link.second}", link.bytes_per_s) for link in like]
            found += below_their_like("bytes/s each way", values, spread)
    return sorted(found, key=lambda one: -one.below)


def below_their_like(figure: str, values: Sequence[tuple[str, float]], spread: float) -> list[Difference]:
    """Which of the values lies more than 10 % beyond ``spread`` below the median of the others."""
    found = []
    for index, (what, value) in enumerate(values):
        others = [other for place, (_, other) in enumerate(values) if place != index]
        if others and value < (typical := median(others)) * (1.0 - SLOWER - spread):
            found.append(Difference(what, figure, value, typical))
    return found


def _text(figure: str, value: float) -> str:
    unit = "FLOP/s" if figure.endswith("_flops") else "params/s" if figure.startswith("adam") else "B/s"
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def names_of(hosts: Sequence[str]) -> list[str]:
    """A name a node: its host's, numbered where several nodes are one host."""
    return [
        host if hosts.count(host) == 1 else f"{host}/{hosts[:index].count(host)}"
        for index, host in enumerate(hosts)
    ]
