"""From what every rank measured to a cluster: the slowest counts, because a step waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from cost_model.cluster_spec import ClusterSpec, Figure, HostSpec
from cost_model.topology import Fabric, NodeTopology, Topology
from tuner.machine.fingerprint import bare_cluster
from tuner.measuring.environment import environment_of
from tuner.probing.nodes import (
    Difference,
    LinkFigures,
    NodeFigures,
    below_their_like,
    names_of,
    slow_links,
    slow_nodes,
)
from tuner.probing.wiring import Wiring, node_wiring

# On a CPU the ranks' "cards" and the "host" are the same memory: half of it plays each, so that a plan for this
# machine cannot count a byte twice.
_CPU_CARD_SHARE = 0.5
# A process with torch loaded, before it holds a tensor.
_CPU_OUTSIDE_BYTES = 0.25 * 2**30

Answer = dict[str, Any]
"""``RankFigures`` of one rank as a dict, and its node's ``kind``."""
Curve = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The cluster, and what lies behind its figures.

    Attributes:
        transfers: by tier (``node``, ``cluster``) and collective (``all_to_all``, ``ring``, ``all_gather``): bytes and
            the slowest rank's seconds.
        nodes, links: node by node, and the matrix of links.
        slow: nodes, cards and links below their like; the cluster holds the slowest of each figure.
        warnings: those in words, and what could not be measured or read.
    """

    cluster: ClusterSpec
    transfers: dict[str, dict[str, Curve]]
    nodes: tuple[NodeFigures, ...] = ()
    links: tuple[LinkFigures, ...] = ()
    slow: tuple[Difference, ...] = ()
    warnings: tuple[str, ...] = field(default=())


def probe_result(
    answers: Sequence[Answer],
    *,
    nodes: int,
    device: Literal["cpu", "cuda"],
    network: str | None = None,
    fabric: Fabric | None = None,
) -> ProbeResult:
    """The cluster that the ranks measured.

    Args:
        answers: of every rank, in their order, contiguous ranks on each node.
        network: name of what joins the nodes.
        fabric: the switches above them.
    """
    per_node = len(answers) // nodes
    groups = [answers[n * per_node : (n + 1) * per_node] for n in range(nodes)]
    names = names_of([group[0]["host"] for group in groups])
    figures = tuple(_node(name, group, per_node) for name, group in zip(names, groups, strict=True))
    inside, between = _card_links(groups, names), _node_links(groups, names, fabric)
    slow = [*slow_nodes(figures), *slow_links(between)]
    if device == "cuda":  # ranks on the CPU share cores and memory: they differ from moment to moment
        slow += [*_slow_cards(groups, names), *slow_links(inside)]
    wiring, warnings = _wiring(groups, names, per_node)
    notes = [f"{one}; the slowest counts" for one in map(str, slow)]
    doubts = [f"{flag.host}: {flag.detail}; its figures are in doubt" for flag in environment_of(answers)[1]]
    warnings += dict.fromkeys(doubts)  # nodes of one host say the same
    if not all(answer["complete"] for answer in answers):
        warnings.append("the time ran out: sizes or pairs are missing (--time-limit)")
    transfers = _transfers(answers)
    cluster = replace(
        _cluster(answers, figures, transfers, device=device, network=network),
        topology=Topology(wiring, fabric) if wiring is not None or fabric is not None else None,
        notes=tuple(notes),
    )
    return ProbeResult(cluster, transfers, figures, (*inside, *between), tuple(slow), (*notes, *warnings))


def _cluster(
    answers: Sequence[Answer],
    nodes: Sequence[NodeFigures],
    transfers: dict[str, dict[str, Curve]],
    *,
    device: Literal["cpu", "cuda"],
    network: str | None,
) -> ClusterSpec:
    hardware, per_node = answers[0]["hardware"], len(answers) // len(nodes)
    bare = bare_cluster(hardware, (network or "network") if len(nodes) > 1 else None)

    def slowest(name: str) -> Figure:
        return Figure(min(node.rates[name] for node in nodes), "measured")

    ram, card = float(hardware["ram_bytes"]), float(hardware["hbm_bytes"])
    if device == "cpu":
        card, ram = ram * _CPU_CARD_SHARE / per_node, ram * (1.0 - _CPU_CARD_SHARE)
    # ranks share the host's memory: one that copies alone is faster
    counts = sorted({count for answer in answers for count in answer["host_link"]})
    rates = [
        (count, min(answer["host_link"][count] for answer in answers if count in answer["host_link"]))
        for count in counts
    ]
    host = HostSpec(
        ram_bytes=Figure(ram, "measured"),
        cores=hardware["cores"],
        cpu_name=hardware["cpu_name"],
        link_bytes_per_s=tuple((count, Figure(rate, "measured")) for count, rate in rates),
        cpu_adam_params_per_s=slowest("adam_params_per_s"),
    )
    sizes = {"node": per_node, "cluster": len(nodes)}
    tiers = []
    for tier in bare.tiers:
        latency, bandwidth = link_fit(on_the_wire(transfers[tier.scope]["all_to_all"], sizes[tier.scope]))
        tiers.append(
            replace(
                tier,
                latency_s=Figure(latency, "measured"),
                bandwidth_bytes_per_s=Figure(bandwidth, "measured"),
            )
        )
    cluster = replace(
        bare,
        name=answers[0]["host"] if len(nodes) == 1 else f"{answers[0]['host']}-{len(nodes)}-nodes",
        nodes=len(nodes),
        gpus_per_node=per_node,
        gpu=replace(
            bare.gpu,
            device=device,
            hbm_bytes=Figure(card, "measured"),
            peak_flops=slowest("gemm_flops"),
            hbm_bandwidth_bytes_per_s=slowest("memory_bytes_per_s"),
        ),
        host=host,
        tiers=tuple(tiers),
    )
    if device == "cpu":
        return replace(cluster, outside_allocator_bytes=Figure(_CPU_OUTSIDE_BYTES, "assumed"))
    return cluster


def _node(name: str, group: Sequence[Answer], per_node: int) -> NodeFigures:
    rates = {
        "gemm_flops": min(one["gemm_flops"] for one in group),
        "memory_bytes_per_s": min(one["memory_bytes_per_s"] for one in group),
        "host_link_bytes_per_s": min(one["host_link"][per_node] for one in group),
        "adam_params_per_s": sum(one["adam_params_per_s"] for one in group),
    }
    if per_node > 1:
        largest = [one["curves"]["node"]["all_to_all"][-1] for one in group]
        rates["node_link_bytes_per_s"] = min(n / seconds for n, seconds in on_the_wire(largest, per_node))
    # a slow node is slow with every other; one slow peer does not count against this one
    reached = [max(pair["bytes_per_s"] for pair in one["node_pairs"]) for one in group if one["node_pairs"]]
    if reached:
        rates["network_bytes_per_s"] = min(reached)
    spread = {name: max(one["spread"][name] for one in group) for name in group[0]["spread"]}
    spread["host_link_bytes_per_s"] = spread.pop("host_link")
    return NodeFigures(name, group[0]["kind"], rates, spread)


def _slow_cards(groups: Sequence[Sequence[Answer]], names: Sequence[str]) -> list[Difference]:
    """Cards below the other cards of their node."""
    found: list[Difference] = []
    for name, group in zip(names, groups, strict=True):
        for figure in ("gemm_flops", "memory_bytes_per_s"):
            values = [(f"card {index} of {name}", one[figure]) for index, one in enumerate(group)]
            found += below_their_like(figure, values, 0.0)
    return found


def _card_links(groups: Sequence[Sequence[Answer]], names: Sequence[str]) -> list[LinkFigures]:
    found = []
    for index, (name, group) in enumerate(zip(names, groups, strict=True)):
        first_rank, prefix = index * len(group), f"{name}:" if len(groups) > 1 else ""
        for place, one in enumerate(group):
            for pair in sorted(one["card_pairs"], key=lambda pair: int(pair["peer"])):
                other = pair["peer"] - first_rank
                if place < other:
                    seen = [pair, *(p for p in group[other]["card_pairs"] if p["peer"] == first_rank + place)]
                    found.append(_link("node", f"{prefix}{place}", f"{prefix}{other}", seen))
    return found


def _node_links(
    groups: Sequence[Sequence[Answer]], names: Sequence[str], fabric: Fabric | None
) -> list[LinkFigures]:
    pairs: dict[tuple[int, int], list[Answer]] = {}
    for node, group in enumerate(groups):
        for one in group:
            for pair in one["node_pairs"]:
                peer = pair["peer"] // len(group)
                pairs.setdefault((min(node, peer), max(node, peer)), []).append(pair)
    found = []
    for (a, b), seen in sorted(pairs.items()):
        hosts = (groups[a][0]["host"], groups[b][0]["host"])
        levels = None if fabric is None else fabric.levels_apart(*hosts)
        found.append(replace(_link("cluster", names[a], names[b], seen), levels=levels))
    return found


def _link(tier: str, first: str, second: str, seen: Sequence[Answer]) -> LinkFigures:
    return LinkFigures(
        tier,
        first,
        second,
        max(pair["latency_s"] for pair in seen),
        min(pair["bytes_per_s"] for pair in seen),
        max(pair["spread"] for pair in seen),
    )


def _transfers(answers: Sequence[Answer]) -> dict[str, dict[str, Curve]]:
    first: dict[str, dict[str, Curve]] = answers[0]["curves"]
    return {
        tier: {
            name: [
                (int(nbytes), max(answer["curves"][tier][name][i][1] for answer in answers))
                for i, (nbytes, _) in enumerate(curve)
            ]
            for name, curve in collectives.items()
        }
        for tier, collectives in first.items()
    }


def _wiring(
    groups: Sequence[Sequence[Answer]], names: Sequence[str], per_node: int
) -> tuple[NodeTopology | None, list[str]]:
    """The first node's wiring, and where other nodes differ from it."""
    found: NodeTopology | None = None
    warnings: list[str] = []
    for name, group in zip(names, groups, strict=True):
        if group[0]["wiring"] is None:
            continue
        node, notes = node_wiring(Wiring(**group[0]["wiring"]), per_node)
        warnings += [f"node {name}: {note}" for note in notes]
        if node is None:
            continue
        if found is None:
            found = node
        elif node.links != found.links:
            warnings.append(f"node {name}: its cards are joined otherwise than those of {names[0]}")
    return found, warnings


def on_the_wire(curve: Sequence[tuple[int, float]], ranks: int) -> list[tuple[float, float]]:
    """An all-to-all keeps a rank's own share: only (P-1)/P of its bytes travel."""
    share = (ranks - 1) / ranks if ranks > 1 else 1.0
    return [(nbytes * share, seconds) for nbytes, seconds in curve]


def link_fit(curve: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(α seconds, B bytes/s) of seconds = α + bytes/B, by least squares on relative errors.

    Both come out positive: a curve whose best α is not is fitted through its smallest time.
    """
    nbytes = np.array([n for n, _ in curve], dtype=np.float64)
    seconds = np.array([s for _, s in curve], dtype=np.float64)
    design = np.stack([1.0 / seconds, nbytes / seconds], axis=1)
    (latency, per_byte), *_ = np.linalg.lstsq(design, np.ones_like(seconds), rcond=None)
    if latency <= 0:
        latency = float(seconds.min())
    if per_byte <= 0:
        per_byte = float(seconds[-1] / nbytes[-1])
    return float(latency), float(1.0 / per_byte)
