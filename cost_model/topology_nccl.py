"""NCCL's topology dump (``NCCL_TOPO_DUMP_FILE``): XML of processors, PCIe bridges, cards, NVLinks, network cards."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from xml.parsers import expat

from cost_model.errors import RuleError
from cost_model.topology import MAX_NUMA_NODES, MAX_NVLINKS, SELF, Nic, NodeTopology

_MAX_DEPTH = 32
_MAX_ELEMENTS = 100_000
_MAX_CARDS, _MAX_NICS = 128, 128
_WHOLE = re.compile(r"-?\d{1,17}", re.ASCII)
_SWITCH_CLASS = "0x0680"
"""PCI class of an NVSwitch, as the target of a card's NVLinks."""


@dataclass(slots=True, eq=False)
class _Element:
    tag: str
    line: int
    attributes: dict[str, str]
    parent: _Element | None
    children: list[_Element] = field(default_factory=list)

    def wrong(self, rule: str, value: object) -> RuleError:
        return RuleError(
            rule=rule,
            value=f"line {self.line}: {value}",
            remedy="Write the dump anew with NCCL_TOPO_DUMP_FILE.",
        )

    def number(self, name: str, least: int = -(10**17), most: int = 10**17) -> int:
        text = self.attributes.get(name, "")
        if _WHOLE.fullmatch(text) is None:
            raise self.wrong(f"<{self.tag}> has a whole number as its {name}", text[:120] or "nothing")
        if not least <= int(text) <= most:
            raise self.wrong(f"<{self.tag}> has {least} to {most} as its {name}", text)
        return int(text)

    def walk(self, tag: str) -> list[_Element]:
        """Elements of this tag below, in the order of the file."""
        found, rest = [], [self]
        while rest:
            one = rest.pop()
            if one.tag == tag:
                found.append(one)
            rest.extend(reversed(one.children))
        return found

    def above(self, tag: str) -> list[_Element]:
        """Elements of this tag above, nearest first."""
        found, one = [], self.parent
        while one is not None:
            if one.tag == tag:
                found.append(one)
            one = one.parent
        return found


def parse_nccl_topology(text: str) -> NodeTopology:
    """The node that a dump describes; of a dump over several hosts, the first one.

    Raises:
        RuleError: not XML, or not such a dump; it names the line.
    """
    system = _read(text)
    processors = [child for child in system.children if child.tag == "cpu"]
    if processors:  # cards of other hosts that share NVLink are listed as well
        first = processors[0].attributes.get("host_hash")
        processors = [cpu for cpu in processors if cpu.attributes.get("host_hash") == first]
    cards = sorted((gpu for cpu in processors for gpu in cpu.walk("gpu")), key=lambda gpu: gpu.number("dev"))
    if not cards:
        raise system.wrong("a topology dump holds a card (<gpu>)", "none")
    if len(cards) > _MAX_CARDS:
        raise cards[_MAX_CARDS].wrong(f"a node has at most {_MAX_CARDS} cards", len(cards))
    devices: set[int] = set()
    for card in cards:
        device = card.number("dev")
        if device in devices:
            raise card.wrong("every card of a node has a dev of its own", device)
        devices.add(device)
    wires = [_wires(card) for card in cards]
    links = tuple(
        tuple(SELF if a == b else _link(first, second, wires[a], wires[b]) for b, second in enumerate(cards))
        for a, first in enumerate(cards)
    )
    nets = [net for cpu in processors for net in cpu.walk("net")]
    if len(nets) > _MAX_NICS:
        raise nets[_MAX_NICS].wrong(f"a node has at most {_MAX_NICS} network cards", len(nets))
    return NodeTopology(links, tuple(_numa(card) for card in cards), tuple(_nic(net, cards) for net in nets))


def _read(text: str) -> _Element:
    """The tree, without document types: nothing in such a file may grow as it is read."""
    parser = expat.ParserCreate()
    root: list[_Element] = []
    open_: list[_Element] = []
    count = 0

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal count
        count += 1
        element = _Element(tag, parser.CurrentLineNumber, attributes, open_[-1] if open_ else None)
        if count > _MAX_ELEMENTS or len(open_) >= _MAX_DEPTH:
            raise element.wrong(
                f"a topology dump has at most {_MAX_ELEMENTS} elements, {_MAX_DEPTH} deep", f"<{tag}>"
            )
        if open_:
            open_[-1].children.append(element)
        else:
            root.append(element)
        open_.append(element)

    def end(_tag: str) -> None:
        open_.pop()

    def refuse(*_: object) -> None:
        raise _Element("", parser.CurrentLineNumber, {}, None).wrong(
            "a topology dump has no document type", "<!DOCTYPE"
        )

    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(text, True)
    except UnicodeEncodeError as error:
        line = text.count("\n", 0, error.start) + 1
        raise _Element("", line, {}, None).wrong(
            "a topology dump is UTF-8 text", f"U+{ord(text[error.start]):04X}"
        ) from None
    except expat.ExpatError as error:
        raise RuleError(
            rule="a topology dump is well-formed XML",
            value=f"line {error.lineno}: {expat.ErrorString(error.code)}",
            remedy="Write the dump anew with NCCL_TOPO_DUMP_FILE.",
        ) from None
    if root[0].tag != "system":
        raise root[0].wrong("a topology dump is one <system>", f"<{root[0].tag}>")
    return root[0]


def _bus(card: _Element) -> str | None:
    device = card.above("pci")
    return device[0].attributes.get("busid", "").lower() if device else None


def _wires(card: _Element) -> tuple[int, dict[str, int]]:
    """NVLinks of a card: how many go to switches, and how many to each other card, by bus id."""
    switched, direct = 0, dict[str, int]()
    for wire in card.children:
        if wire.tag != "nvlink":
            continue
        count = wire.number("count", 0, MAX_NVLINKS)
        if wire.attributes.get("tclass", "").startswith(_SWITCH_CLASS):
            switched += count
        else:
            target = wire.attributes.get("target", "").lower()
            direct[target] = direct.get(target, 0) + count
    return switched, direct


def _link(
    first: _Element, second: _Element, one: tuple[int, dict[str, int]], other: tuple[int, dict[str, int]]
) -> str:
    joined = max(one[1].get(_bus(second) or "", 0), other[1].get(_bus(first) or "", 0))
    joined += min(one[0], other[0])
    if joined > MAX_NVLINKS:
        raise second.wrong(f"at most {MAX_NVLINKS} NVLinks join two cards", joined)
    return f"NV{joined}" if joined > 0 else _pci_path(first, second)


def _pci_path(first: _Element, second: _Element) -> str:
    """How far two devices are apart over PCIe; the dump does not tell host bridges of one processor apart."""
    mine, theirs = first.above("pci")[1:], second.above("pci")[1:]
    also = {id(bridge) for bridge in theirs}
    shared = next((bridge for bridge in mine if id(bridge) in also), None)
    if shared is not None:
        return "PIX" if shared is mine[0] and shared is theirs[0] else "PXB"
    return "PHB" if first.above("cpu")[0] is second.above("cpu")[0] else "SYS"


def _numa(card: _Element) -> int | None:
    processor = card.above("cpu")[0]
    given = "numaid" in processor.attributes
    number = processor.number("numaid", -1, MAX_NUMA_NODES - 1) if given else -1
    return number if number >= 0 else None


def _nic(net: _Element, cards: list[_Element]) -> Nic:
    name = net.attributes.get("name", "")
    if not name or not name.isprintable():
        raise net.wrong("a network card has a name of visible characters", repr(name[:120]))
    order = ("PIX", "PXB", "PHB", "SYS")
    paths = [order.index(_pci_path(net, card)) for card in cards]
    speed = net.number("speed") if "speed" in net.attributes else 0  # Mbit/s
    return Nic(
        name[:200],
        speed * 1e6 / 8 if speed > 0 else None,
        tuple(card for card, path in enumerate(paths) if path == min(paths)),
    )
