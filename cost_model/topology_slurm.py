"""Slurm's ``topology.conf``: leaf switches and what is above them, or blocks of nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from cost_model.errors import RuleError
from cost_model.topology import Fabric, Switch

MAX_HOSTS = 65_536
_MAX_LEVELS = 32
_PAIR = re.compile(r"(\w+)\s*=\s*(\S+)")
_KEYS = {
    "switchname": {"switchname", "nodes", "switches", "linkspeed", "comment"},
    "blockname": {"blockname", "nodes", "comment"},
    "blocksizes": {"blocksizes"},
}


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    text: str

    def wrong(self, rule: str, remedy: str, what: str | None = None) -> RuleError:
        shown = self.text if what is None else what
        return RuleError(rule=rule, value=f"line {self.number}: {shown[:120]}", remedy=remedy)


def parse_slurm_topology(text: str) -> Fabric:
    """The switches (``SwitchName=``) or blocks (``BlockName=``) of a ``topology.conf``.

    Blocks are leaves; of ``BlockSizes`` every larger size makes a level of consecutive blocks.

    Raises:
        RuleError: a line is not understood, names hosts wrongly, or the switches form no tree; it names the line.
    """
    switches: dict[str, tuple[_Line, tuple[str, ...], tuple[str, ...]]] = {}
    blocks: dict[str, tuple[_Line, tuple[str, ...]]] = {}
    sizes: tuple[int, ...] = ()
    for line in _lines(text):
        kind, pairs = _pairs(line)
        name = pairs[kind]
        if kind == "blocksizes":
            sizes = _sizes(line, name)
            continue
        if name in switches or name in blocks:
            raise line.wrong("a switch or block is described once", "Remove one of the two lines.", name)
        nodes = expand_hosts(pairs["nodes"], line.number) if "nodes" in pairs else ()
        if kind == "blockname":
            if not nodes:
                raise line.wrong("a block names its nodes", "Add Nodes=.")
            blocks[name] = line, nodes
            continue
        below = expand_hosts(pairs["switches"], line.number) if "switches" in pairs else ()
        if bool(nodes) == bool(below):
            raise line.wrong("a switch has nodes or switches below it", "Give one of Nodes= and Switches=.")
        switches[name] = line, nodes, below
    if switches and blocks:
        line = next(iter(blocks.values()))[0]
        raise line.wrong("one file describes switches or blocks", "Keep one kind of line.")
    if not switches and not blocks:
        raise RuleError(
            rule="a topology.conf describes at least one switch or block",
            value="nothing",
            remedy="Give the file with the SwitchName= or BlockName= lines (topology.yaml is another form).",
        )
    _once([(line, nodes) for line, nodes, _ in switches.values()] + list(blocks.values()))
    return _tree(switches) if switches else _blocks(blocks, sizes)


def expand_hosts(expression: str, line: int = 1) -> tuple[str, ...]:
    """Names of a hostlist such as ``rack[0-1]n[01-04,07],login``: the last bracket runs fastest, zeros are kept.

    Raises:
        RuleError: brackets do not match, a range runs backwards, or it stands for more than 65,536 names.
    """
    where = _Line(line, expression)
    names: list[str] = []
    for item in _split(expression, where):
        parts = [
            _ranges(part[1:-1], where) if part.startswith("[") else [part]
            for part in re.findall(r"\[[^\[\]]*\]|[^\[\]]+", item)
        ]
        if len(names) + prod(len(part) for part in parts) > MAX_HOSTS:
            raise where.wrong(f"a list stands for at most {MAX_HOSTS} hosts", "Correct the ranges.")
        made = [""]
        for part in parts:
            made = [head + tail for head in made for tail in part]
        names += made
    return tuple(names)


def _lines(text: str) -> Iterator[_Line]:
    """Lines with something in them; a backslash at the end joins the next one."""
    held, first = "", 0
    for number, raw in enumerate(text.splitlines(), start=1):
        body = raw.split("#", 1)[0].rstrip()
        first = first or number
        if body.endswith("\\"):
            held += body[:-1] + " "
            continue
        whole = (held + body).strip()
        if whole:
            yield _Line(first, whole)
        held, first = "", 0
    if held.strip():
        yield _Line(first, held.strip())


def _pairs(line: _Line) -> tuple[str, dict[str, str]]:
    """Which kind of line it is, and its keys in lower case."""
    if _PAIR.sub("", line.text).strip():
        raise line.wrong(
            "a line of a topology.conf is KEY=VALUE, one or several",
            "Correct it; a file that it includes must be put in its place.",
        )
    found = [(key.lower(), value) for key, value in _PAIR.findall(line.text)]
    pairs = dict(found)
    kind = next((kind for kind in _KEYS if kind in pairs), None)
    if kind is None or len(pairs) < len(found) or not pairs.keys() <= _KEYS[kind]:
        raise line.wrong(
            "a line gives SwitchName with Nodes or Switches, BlockName with Nodes, or BlockSizes",
            "Correct its keys.",
        )
    return kind, pairs


def _sizes(line: _Line, text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and 0 < len(part) < 7 and int(part) > 0 for part in parts):
        raise line.wrong("BlockSizes is a list of numbers", "For example BlockSizes=4,16.")
    sizes = tuple(int(part) for part in parts)
    if any(big <= small or big % small for small, big in pairwise(sizes)):
        raise line.wrong("each of BlockSizes is a multiple of the one before", "For example BlockSizes=4,16.")
    return sizes


def _split(expression: str, where: _Line) -> Iterator[str]:
    """Items between the commas that lie outside brackets."""
    item, inside = "", False
    for letter in expression:
        if letter in "[]":
            if (letter == "[") == inside:
                raise where.wrong("brackets of a host list open and close in turn", "Correct the brackets.")
            inside = not inside
        if letter == "," and not inside:
            if not item:
                raise where.wrong("a host list has a name between two commas", "Remove a comma.")
            yield item
            item = ""
        else:
            item += letter
    if inside or not item:
        raise where.wrong("a host list ends with a name or a closed bracket", "Correct its end.")
    yield item


def _ranges(body: str, where: _Line) -> list[str]:
    numbers: list[str] = []
    for part in body.split(","):
        found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part, re.ASCII)
        low, high = (int(found.group(1)), int(found.group(2) or found.group(1))) if found else (1, 0)
        if found is None or high < low:
            raise where.wrong("brackets hold numbers and rising ranges", "For example [0-3,12].")
        if len(numbers) + high - low >= MAX_HOSTS:
            raise where.wrong(f"a list stands for at most {MAX_HOSTS} hosts", "Correct the ranges.")
        width = len(found.group(1))
        numbers += [f"{number:0{width}d}" for number in range(low, high + 1)]
    return numbers


def _once(lines: list[tuple[_Line, tuple[str, ...]]]) -> None:
    seen: dict[str, int] = {}
    for line, nodes in lines:
        for node in nodes:
            if node in seen:
                raise line.wrong(
                    "a node hangs on one leaf switch or block",
                    f"It is listed in line {seen[node]} too: remove one of the two.",
                    node,
                )
            seen[node] = line.number
        if len(seen) > MAX_HOSTS:
            raise line.wrong(f"a cluster has at most {MAX_HOSTS} nodes", "Correct the ranges.")


def _tree(described: dict[str, tuple[_Line, tuple[str, ...], tuple[str, ...]]]) -> Fabric:
    parents: dict[str, str] = {}
    for name, (line, _, below) in described.items():
        for child in below:
            if child not in described:
                raise line.wrong("a switch that another one names is described", "Add its line.", child)
            if child in parents:
                raise line.wrong(
                    "a switch has one switch above it",
                    f"{child} is also below {parents[child]}: keep one of the two.",
                    child,
                )
            parents[child] = name
    for name, (line, _, _) in described.items():
        above, height = parents.get(name), 0
        while above is not None:
            height += 1
            if above == name or height > _MAX_LEVELS:
                raise line.wrong(
                    f"switches form a tree of at most {_MAX_LEVELS} levels", "Remove the circle.", name
                )
            above = parents.get(above)
    return Fabric(tuple(Switch(name, nodes, parents.get(name)) for name, (_, nodes, _) in described.items()))


def _blocks(blocks: dict[str, tuple[_Line, tuple[str, ...]]], sizes: tuple[int, ...]) -> Fabric:
    """Blocks as leaves; larger sizes join as many consecutive ones as fit into them."""
    row: list[Switch] = [Switch(name, nodes) for name, (_, nodes) in blocks.items()]
    done: list[Switch] = []
    for small, big in pairwise(sizes):
        above: list[Switch] = []
        for at in range(0, len(row), big // small):
            group = row[at : at + big // small]
            joined = Switch(
                f"{group[0].name}+{len(group) - 1}@{big}" if len(group) > 1 else f"{group[0].name}@{big}"
            )
            done += [Switch(one.name, one.nodes, joined.name) for one in group]
            above.append(joined)
        row = above
    return Fabric((*done, *row))
