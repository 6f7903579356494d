"""A cluster's topology from what other tools write: ``nvidia-smi topo -m``, NCCL's dump, Slurm's ``topology.conf``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from cost_model.cluster_spec import ClusterSpec
from cost_model.errors import RuleError
from cost_model.text_file import read_text
from cost_model.topology import (
    LINK_KIND,
    MAX_CARDS,
    MAX_NUMA_NODES,
    SELF,
    Nic,
    NodeTopology,
    Topology,
    distance,
)
from cost_model.topology_file import check_topology
from cost_model.topology_nccl import parse_nccl_topology
from cost_model.topology_slurm import parse_slurm_topology

MAX_FILE_BYTES = 4 * 2**20
_MAX_DEVICES = 512
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CARD = re.compile(r"GPU\d+", re.ASCII)
_LEGEND = re.compile(r"\s*(NIC\d+)\s*:\s*(\S+)\s*$", re.ASCII)
Parsed = TypeVar("Parsed")


def read_topology(
    *,
    nvidia_smi: str | Path | None = None,
    nccl: str | Path | None = None,
    slurm: str | Path | None = None,
) -> Topology:
    """What the files given say, put together.

    Args:
        nvidia_smi: output of ``nvidia-smi topo -m`` on one node.
        nccl: file that NCCL wrote to ``NCCL_TOPO_DUMP_FILE`` on one node.
        slurm: ``topology.conf``.

    Raises:
        RuleError: a file cannot be read or understood (it names file and line), or two contradict each other.
    """
    matrix = None if nvidia_smi is None else _parse(nvidia_smi, parse_nvidia_smi_topology)
    dump = None if nccl is None else _parse(nccl, parse_nccl_topology)
    fabric = None if slurm is None else _parse(slurm, parse_slurm_topology)
    return Topology(merge_node(matrix, dump), fabric)


def _parse(path: str | Path, parse: Callable[[str], Parsed]) -> Parsed:
    try:
        text = read_text(path, MAX_FILE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RuleError(
            rule="a topology file must be a readable text file",
            value=str(path),
            remedy=f"Check the path ({reason}).",
        ) from None
    try:
        return parse(text)
    except RuleError as error:
        raise RuleError(rule=error.rule, value=f"{path}, {error.value}", remedy=error.remedy) from None


def parse_nvidia_smi_topology(text: str) -> NodeTopology:
    """The matrix that ``nvidia-smi topo -m`` prints.

    Raises:
        RuleError: there is no matrix, it is not square or not symmetric, or a cell is no link; it names the line.
    """
    devices: list[str] = []
    known: set[str] = set()
    cells: dict[str, tuple[int, list[str], list[str]]] = {}
    names: dict[str, str] = {}
    for number, raw in enumerate(text.splitlines(), start=1):
        line = _COLOUR.sub("", raw)
        words = line.split()
        if found := _LEGEND.match(line):
            names[found.group(1)] = _visible(found.group(2), number)
        elif not words:
            continue
        elif not devices and _CARD.fullmatch(words[0]) and SELF not in words:
            devices = _devices(words, number)
            known = set(devices)
        elif words[0] in known and words[0] not in names:
            if words[0] in cells:
                raise _wrong("a device has one row", number, words[0])
            kinds, rest = words[1 : 1 + len(devices)], words[1 + len(devices) :]
            _check_row(devices, words[0], kinds, number)
            cells[words[0]] = number, kinds, rest
    cards = [name for name in devices if _CARD.fullmatch(name)]
    missing = [name for name in cards if name not in cells]
    if not cards or missing:
        raise _wrong(
            "`nvidia-smi topo -m` prints a head of devices and a row for every card",
            len(text.splitlines()),
            f"no row of {missing[0]}" if missing else "no head",
        )
    _check_symmetry(devices, cards, cells)
    places = [place for place, name in enumerate(devices) if name in cells and _CARD.fullmatch(name)]
    links = tuple(tuple(cells[card][1][place] for place in places) for card in cards)
    links = tuple(tuple("SYS" if kind == "SOC" else kind for kind in row) for row in links)
    nics = tuple(
        _nic(names.get(name, name), [cells[card][1][devices.index(name)] for card in cards])
        for name in devices
        if name not in cards
    )
    return NodeTopology(links, tuple(_numa(*cells[card]) for card in cards), nics)


def merge_node(matrix: NodeTopology | None, dump: NodeTopology | None) -> NodeTopology | None:
    """One node from both descriptions: links as ``nvidia-smi`` tells them (finer), network cards' rates from NCCL.

    Raises:
        RuleError: they describe different nodes.
    """
    if matrix is None or dump is None:
        return matrix or dump
    if matrix.cards != dump.cards or matrix.islands != dump.islands:
        raise RuleError(
            rule="the matrix of nvidia-smi and the dump of NCCL must describe the same node",
            value={
                "nvidia-smi": f"{matrix.cards} cards, {_summary(matrix)}",
                "nccl": f"{dump.cards} cards, {_summary(dump)}",
            },
            remedy="Take both on one node, with the same cards visible.",
        )
    near = {nic.name: nic.nearest for nic in matrix.nics}
    known = {nic.name for nic in dump.nics}
    nics = (
        *(replace(nic, nearest=near.get(nic.name, nic.nearest)) for nic in dump.nics),
        *(nic for nic in matrix.nics if nic.name not in known),
    )
    numa = tuple(a if a is not None else b for a, b in zip(matrix.numa, dump.numa, strict=True))
    return NodeTopology(matrix.links, numa, nics)


def with_topology(cluster: ClusterSpec, topology: Topology) -> ClusterSpec:
    """The cluster with this topology; what it leaves open stays as it was.

    Raises:
        RuleError: it has another number of cards than a node, or fewer nodes than the cluster.
    """
    before = cluster.topology or Topology()
    merged = Topology(topology.node or before.node, topology.fabric or before.fabric)
    changed = replace(cluster, topology=merged)
    check_topology(changed)
    return changed


def _summary(node: NodeTopology) -> str:
    return ", ".join(f"{count} pairs {kind}" for kind, count in node.kinds.items()) or "no pairs"


def _wrong(rule: str, line: int, what: object) -> RuleError:
    return RuleError(
        rule=rule, value=f"line {line}: {what}", remedy="Save the output of `nvidia-smi topo -m` anew."
    )


def _devices(words: list[str], line: int) -> list[str]:
    """Names at the head of the matrix; the columns of affinity that follow have names of two or three words."""
    devices: list[str] = []
    for word in words:
        if word in ("CPU", "NUMA", "GPU"):
            break
        devices.append(_visible(word, line))
    cards = sum(_CARD.fullmatch(name) is not None for name in devices)
    if cards > MAX_CARDS:
        raise _wrong(f"a node has at most {MAX_CARDS} cards", line, cards)
    if len(set(devices)) < len(devices) or len(devices) > _MAX_DEVICES:
        raise _wrong(
            f"the matrix names each of at most {_MAX_DEVICES} devices once", line, " ".join(words)[:80]
        )
    return devices


def _check_row(devices: list[str], name: str, kinds: list[str], line: int) -> None:
    if len(kinds) < len(devices):
        raise _wrong("a row has a cell for every device", line, f"{name}: {len(kinds)} of {len(devices)}")
    for other, kind in zip(devices, kinds, strict=True):
        if (kind == SELF) != (other == name) or not (kind == SELF or LINK_KIND.fullmatch(kind)):
            raise _wrong(
                "a cell is X on the diagonal and NV#, PIX, PXB, PHB, NODE or SYS elsewhere",
                line,
                f"{name} to {other}: {kind[:20]}",
            )


def _check_symmetry(
    devices: list[str], cards: list[str], cells: dict[str, tuple[int, list[str], list[str]]]
) -> None:
    at = {name: place for place, name in enumerate(devices)}
    for a in cards:
        for b in cards:
            there, back = cells[a][1][at[b]], cells[b][1][at[a]]
            if there != back:
                raise _wrong(
                    "a link is of one kind both ways", cells[b][0], f"{a} to {b} {there}, back {back}"
                )


def _numa(line: int, _kinds: list[str], rest: list[str]) -> int | None:
    """The second of the columns after the matrix: CPU affinity, NUMA affinity, ..."""
    word = rest[1] if len(rest) > 1 else ""
    if not (word.isascii() and word.isdigit()):
        return None
    if len(word) > 9 or int(word) >= MAX_NUMA_NODES:
        raise _wrong(f"a card is near one NUMA node of at most {MAX_NUMA_NODES}", line, word[:20])
    return int(word)


def _visible(name: str, line: int) -> str:
    if not name.isprintable():
        raise _wrong("a device has a name of visible characters", line, ascii(name[:80]))
    return name


def _nic(name: str, kinds: list[str]) -> Nic:
    paths = [distance(kind) for kind in kinds]
    return Nic(name[:200], None, tuple(card for card, path in enumerate(paths) if path == min(paths)))
