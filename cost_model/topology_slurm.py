"""Slurm's ``topology.conf``: leaf switches and what is above them, or blocks of nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from cost_model.errors import RuleError
from cost_model.topology import MAX_HOSTS, MAX_LEVELS, MAX_NAME, MAX_SWITCHES, Fabric, Switch

_KEY = re.compile(r"\w+")
_SIGN = re.compile(r"[\[\],]")
_PART = re.compile(r"\[[^\[\]]*\]|[^\[\]]+")
_NUMBERS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
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
    sizes_line = _Line(0, "")
    leaf_lines: dict[str, int] = {}
    parents: dict[str, str] = {}
    for line in _lines(text):
        kind, pairs = _pairs(line)
        name = pairs[kind]
        if kind == "blocksizes":
            sizes, sizes_line = _sizes(line, name), line
            continue
        _check_name(line, name)
        if name in switches or name in blocks:
            raise line.wrong("a switch or block is described once", "Remove one of the two lines.", name)
        if len(switches) + len(blocks) == MAX_SWITCHES:
            raise line.wrong(f"a file describes at most {MAX_SWITCHES} switches or blocks", "Remove lines.")
        nodes = expand_hosts(pairs["nodes"], line.number) if "nodes" in pairs else ()
        _hang_nodes(leaf_lines, line, nodes)
        if kind == "blockname":
            if not nodes:
                raise line.wrong("a block names its nodes", "Add Nodes=.")
            blocks[name] = line, nodes
            continue
        below = expand_hosts(pairs["switches"], line.number) if "switches" in pairs else ()
        if bool(nodes) == bool(below):
            raise line.wrong("a switch has nodes or switches below it", "Give one of Nodes= and Switches=.")
        _hang_switches(parents, line, name, below)
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
    return _tree(switches, parents) if switches else _blocks(blocks, sizes, sizes_line)


def expand_hosts(expression: str, line: int = 1) -> tuple[str, ...]:
    """Names of a hostlist such as ``rack[0-1]n[01-04,07],login``: the last bracket runs fastest, zeros are kept.

    Raises:
        RuleError: brackets do not match, a range runs backwards, a name has over 256 characters, or it stands for
            more than 65,536 names.
    """
    where = _Line(line, expression)
    names: list[str] = []
    for item in _split(expression, where):
        parts: list[list[str]] = []
        longest, many = 0, 1
        for found in _PART.finditer(item):  # counted before it is made: a short line may stand for any amount
            text = found[0]
            spans = _spans(text[1:-1], where) if text.startswith("[") else []
            longest += max((max(len(str(high)), width) for _, high, width in spans), default=len(text))
            many *= sum(high - low + 1 for low, high, _ in spans) or 1
            if longest > MAX_NAME:
                raise where.wrong(f"a name has at most {MAX_NAME} characters", "Correct the name.")
            if len(names) + many > MAX_HOSTS:
                raise where.wrong(f"a list stands for at most {MAX_HOSTS} hosts", "Correct the ranges.")
            parts.append(_numbers(spans) if spans else [text])
        made = [""]
        for part in parts:
            made = [head + tail for head in made for tail in part]
        _check_name(where, made[0])
        names += made
    return tuple(names)


def _check_name(line: _Line, name: str) -> None:
    if len(name) > MAX_NAME or not name.isprintable():
        raise line.wrong(
            f"a name has at most {MAX_NAME} characters, all of them visible", "Correct the name."
        )


def _lines(text: str) -> Iterator[_Line]:
    """Lines with something in them; a backslash at the end joins the next one."""
    held: list[str] = []
    first = 0
    for number, raw in enumerate(text.splitlines(), start=1):
        body = raw.split("#", 1)[0].rstrip()
        first = first or number
        if body.endswith("\\"):
            held.append(body[:-1])
            continue
        whole = " ".join((*held, body)).strip()
        if whole:
            yield _Line(first, whole)
        held, first = [], 0
    if whole := " ".join(held).strip():
        yield _Line(first, whole)


def _pairs(line: _Line) -> tuple[str, dict[str, str]]:
    """Which kind of line it is, and its keys in lower case."""
    found: list[tuple[str, str]] = []
    words = iter(line.text.split())
    for word in words:
        key, sign, value = word.partition("=")
        if not sign:  # blanks may stand around the sign
            sign, value = (following := next(words, ""))[:1], following[1:]
        value = value or next(words, "")
        if sign != "=" or not value or not _KEY.fullmatch(key):
            raise line.wrong(
                "a line of a topology.conf is KEY=VALUE, one or several",
                "Correct it; a file that it includes must be put in its place.",
            )
        found.append((key.lower(), value))
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
    start, inside = 0, False
    for found in _SIGN.finditer(expression):
        sign, at = found[0], found.start()
        if sign in "[]":
            if (sign == "[") == inside:
                raise where.wrong("brackets of a host list open and close in turn", "Correct the brackets.")
            inside = not inside
        elif not inside:
            if start == at:
                raise where.wrong("a host list has a name between two commas", "Remove a comma.")
            yield expression[start:at]
            start = at + 1
    if inside or start == len(expression):
        raise where.wrong("a host list ends with a name or a closed bracket", "Correct its end.")
    yield expression[start:]


def _spans(body: str, where: _Line) -> list[tuple[int, int, int]]:
    """Ranges inside a bracket: first and last number, and how many digits the first one is written with."""
    spans: list[tuple[int, int, int]] = []
    many = 0
    if body.count(",") >= MAX_HOSTS:
        raise where.wrong(f"a list stands for at most {MAX_HOSTS} hosts", "Correct the ranges.")
    for part in body.split(","):
        found = _NUMBERS.fullmatch(part)
        low, high = (int(found.group(1)), int(found.group(2) or found.group(1))) if found else (1, 0)
        if found is None or high < low:
            raise where.wrong("brackets hold numbers and rising ranges", "For example [0-3,12].")
        spans.append((low, high, len(found.group(1))))
        many += high - low + 1
        if many > MAX_HOSTS:
            raise where.wrong(f"a list stands for at most {MAX_HOSTS} hosts", "Correct the ranges.")
    return spans


def _numbers(spans: list[tuple[int, int, int]]) -> list[str]:
    return [f"{number:0{width}d}" for low, high, width in spans for number in range(low, high + 1)]


def _hang_nodes(leaf_lines: dict[str, int], line: _Line, nodes: tuple[str, ...]) -> None:
    for node in nodes:
        if node in leaf_lines:
            raise line.wrong(
                "a node hangs on one leaf switch or block",
                f"It is listed in line {leaf_lines[node]} too: remove one of the two.",
                node,
            )
        leaf_lines[node] = line.number
    if len(leaf_lines) > MAX_HOSTS:
        raise line.wrong(f"a cluster has at most {MAX_HOSTS} nodes", "Correct the ranges.")


def _hang_switches(parents: dict[str, str], line: _Line, name: str, below: tuple[str, ...]) -> None:
    for child in below:
        if child in parents:
            raise line.wrong(
                "a switch has one switch above it",
                f"{child} is also below {parents[child]}: keep one of the two.",
                child,
            )
        parents[child] = name
    if len(parents) > MAX_SWITCHES:
        raise line.wrong(f"a cluster has at most {MAX_SWITCHES} switches", "Correct the ranges.")


def _tree(
    described: dict[str, tuple[_Line, tuple[str, ...], tuple[str, ...]]], parents: dict[str, str]
) -> Fabric:
    for line, _, below in described.values():
        for child in below:
            if child not in described:
                raise line.wrong("a switch that another one names is described", "Add its line.", child)
    for name, (line, _, _) in described.items():
        above, height = parents.get(name), 0
        while above is not None:
            height += 1
            if above == name or height > MAX_LEVELS:
                raise line.wrong(
                    f"switches form a tree of at most {MAX_LEVELS} levels", "Remove the circle.", name
                )
            above = parents.get(above)
    return Fabric(tuple(Switch(name, nodes, parents.get(name)) for name, (_, nodes, _) in described.items()))


def _blocks(blocks: dict[str, tuple[_Line, tuple[str, ...]]], sizes: tuple[int, ...], line: _Line) -> Fabric:
    """Blocks as leaves; larger sizes join as many consecutive ones as fit into them."""
    row: list[Switch] = [Switch(name, nodes) for name, (_, nodes) in blocks.items()]
    done: list[Switch] = []
    names = set(blocks)
    for small, big in pairwise(sizes):
        above: list[Switch] = []
        for at in range(0, len(row), big // small):
            group = row[at : at + big // small]
            joined = Switch(
                f"{group[0].name}+{len(group) - 1}@{big}" if len(group) > 1 else f"{group[0].name}@{big}"
            )
            _check_name(line, joined.name)
            names.add(joined.name)
            done += [Switch(one.name, one.nodes, joined.name) for one in group]
            above.append(joined)
        row = above
    whole = (*done, *row)
    if not len(names) == len(whole) <= MAX_SWITCHES:
        raise line.wrong(
            f"blocks and what BlockSizes joins are at most {MAX_SWITCHES}, of different names",
            "Give fewer sizes, or rename blocks that have @ in their names.",
        )
    return Fabric(whole)
