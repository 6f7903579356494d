"""What ``flatpeak probe`` prints: figures, transfers by size, nodes and links side by side, the topology."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from api.cli.console import err, facts, out, table
from api.units import bytes_text, count_text, seconds_text

if TYPE_CHECKING:
    from cost_model.topology import Topology
    from tuner.probing.cluster import ProbeResult

_MOST_LINKS = 40
_NODE_FIGURES = (
    ("gemm_flops", "matrix rate"),
    ("memory_bytes_per_s", "memory"),
    ("host_link_bytes_per_s", "host link"),
    ("node_link_bytes_per_s", "inside"),
    ("network_bytes_per_s", "network"),
    ("adam_params_per_s", "AdamW"),
)


def measured_json(probed: ProbeResult) -> dict[str, Any]:
    """Everything that was measured beside the cluster, for programs."""
    return {
        "transfers": {
            tier: {
                name: [{"bytes": nbytes, "seconds": seconds} for nbytes, seconds in curve]
                for name, curve in collectives.items()
            }
            for tier, collectives in probed.transfers.items()
        },
        "nodes": [asdict(node) for node in probed.nodes],
        "links": [asdict(link) for link in probed.links],
        "slow": [asdict(one) | {"below_share": one.below} for one in probed.slow],
        "warnings": list(probed.warnings),
    }


def print_measured(probed: ProbeResult) -> None:
    """Transfers, nodes when there are several, links, and warnings on stderr."""
    for tier, collectives in probed.transfers.items():
        sizes = list(dict.fromkeys(nbytes for curve in collectives.values() for nbytes, _ in curve))
        found = {name: dict(curve) for name, curve in collectives.items()}
        rows = [(bytes_text(n), *(seconds_text(curve.get(n)) for curve in found.values())) for n in sizes]
        where = "inside a node" if tier == "node" else "across nodes"
        columns = ("bytes", *(name.replace("_", "-") for name in found))
        out.print(table(f"Transfers {where}, slowest rank", columns, rows, numeric=range(len(columns))))
    if len(probed.nodes) > 1:
        slow = {(one.what, one.figure) for one in probed.slow}
        rows = [
            (
                node.name,
                *(
                    figure_text(name, node.rates.get(name))
                    + (" slow" if (f"node {node.name}", name) in slow else "")
                    for name, _ in _NODE_FIGURES
                ),
            )
            for node in probed.nodes
        ]
        out.print(
            table("Nodes, each by its slowest rank", ("node", *(title for _, title in _NODE_FIGURES)), rows)
        )
    if probed.links:
        shown = sorted(probed.links, key=lambda link: (link.tier != "cluster", link.bytes_per_s))[
            :_MOST_LINKS
        ]
        leveled = any(link.levels is not None for link in shown)
        rows = [
            (
                link.tier,
                link.first,
                link.second,
                seconds_text(link.latency_s),
                f"{bytes_text(link.bytes_per_s)}/s",
                *((count_text(link.levels),) if leveled else ()),
            )
            for link in shown
        ]
        more = (
            f", the slowest {_MOST_LINKS} of {len(probed.links)}" if len(probed.links) > _MOST_LINKS else ""
        )
        columns = ("tier", "from", "to", "latency", "each way", *(("levels",) if leveled else ()))
        out.print(table(f"Links, a rank's share{more}", columns, rows, numeric=(3, 4, 5)))
    for warning in probed.warnings:
        err.print(f"Warning: {warning}", markup=False)


def print_topology(topology: Topology) -> None:
    """How the cluster is wired, in a few lines."""
    pairs: list[tuple[str, str]] = []
    if (node := topology.node) is not None:
        kinds = ", ".join(f"{count} pairs {kind}" for kind, count in node.kinds.items()) or "one card"
        pairs += [("cards of a node", str(node.cards)), ("links", kinds)]
        if len(node.islands) > 1:
            pairs.append(("closest together", " | ".join(" ".join(map(str, one)) for one in node.islands)))
        if node.numa:
            pairs.append(
                ("NUMA node of each card", " ".join("–" if n is None else str(n) for n in node.numa))
            )
        pairs += [
            (
                f"network card {nic.name}",
                ("" if nic.bytes_per_s is None else f"{bytes_text(nic.bytes_per_s)}/s, ")
                + f"nearest to {' '.join(map(str, nic.nearest)) or 'none'}",
            )
            for nic in node.nics
        ]
    if (fabric := topology.fabric) is not None:
        pairs.append(("nodes", count_text(len(fabric.nodes))))
        pairs.append(("leaves", ", ".join(f"{leaf.name} ({len(leaf.nodes)})" for leaf in fabric.leaves[:16])))
        if len(fabric.leaves) > 16:
            pairs.append(("", f"and {len(fabric.leaves) - 16} more"))
        pairs.append(("fewest nodes below a switch, by level", " ".join(map(str, fabric.level_sizes))))
    out.print(facts("Topology", pairs))


def figure_rows(mapping: dict[str, Any], prefix: str = "") -> list[tuple[str, str, str]]:
    """A cluster's mapping as rows of name, value and source; its topology and notes are shown elsewhere."""
    rows: list[tuple[str, str, str]] = []
    for key, value in mapping.items():
        name = f"{prefix}{key}"
        if not prefix and key in ("topology", "notes"):
            continue
        if isinstance(value, dict) and set(value) == {"value", "source"}:
            rows.append((name, figure_text(key, float(value["value"])), str(value["source"])))
        elif isinstance(value, dict):
            rows.extend(figure_rows(value, f"{name}."))
        elif isinstance(value, list):
            for place, item in enumerate(value):
                rows.extend(
                    figure_rows(item, f"{name}[{place}].")
                    if isinstance(item, dict)
                    else [(name, str(item), "")]
                )
        elif value not in (None, ""):
            rows.append((name, str(value), ""))
    return rows


def figure_text(key: str, value: float | None) -> str:
    """A figure in the unit that its name ends with."""
    if value is None:
        return "–"
    if key.endswith("bytes_per_s"):
        return f"{bytes_text(value)}/s"
    if key.endswith("_bytes"):
        return bytes_text(value)
    if key.endswith("_flops"):
        return f"{value / 1e9:,.1f} GFLOP/s"
    if key.endswith("_per_s"):
        return f"{value:,.0f}/s"
    return seconds_text(value) if key.endswith("_s") else f"{value:g}"
