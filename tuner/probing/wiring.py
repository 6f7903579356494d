"""How the cards of this node are joined: ``nvidia-smi topo -m``, and the dump that NCCL writes as it joins them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cost_model.errors import RuleError
from cost_model.topology import NodeTopology
from cost_model.topology_import import merge_node, parse_nvidia_smi_topology
from cost_model.topology_nccl import parse_nccl_topology

_COMMAND_S = 40.0
_VARIABLE = "NCCL_TOPO_DUMP_FILE"
_JOIN_CARDS = """
import sys, torch
cards = [torch.ones(1, device=f"cuda:{n}") for n in range(int(sys.argv[1]))]
torch.cuda.nccl.all_reduce(cards)
"""


@dataclass(frozen=True, slots=True)
class Wiring:
    """The text of both tools, as far as there is any."""

    nvidia_smi: str = ""
    nccl: str = ""


def read_wiring(device: str, cards: int) -> Wiring:
    """What both tools say of this node's first ``cards`` cards; nothing on the CPU."""
    if device != "cuda":
        return Wiring()
    return Wiring(_said("nvidia-smi", "topo", "-m"), _nccl_dump(cards))


def _nccl_dump(cards: int) -> str:
    """NCCL's description of the node, written as a process of its own joins the cards.

    The ranks' own groups are there already, and one more made for this alone can hang them; this process can
    only run out of time. A file that the user had NCCL write is read as it is.
    """
    if own := os.environ.get(_VARIABLE):
        return _text(Path(own))
    with tempfile.TemporaryDirectory(prefix="flatpeak-wiring-") as folder:
        file = Path(folder) / "topology.xml"
        _said(sys.executable, "-c", _JOIN_CARDS, str(cards), **{_VARIABLE: str(file)})
        return _text(file)


def _said(*command: str, **environment: str) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            check=False,
            env=os.environ | environment,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def node_wiring(wiring: Wiring, cards: int) -> tuple[NodeTopology | None, list[str]]:
    """The node that was described, if it has ``cards`` cards, and what could not be used."""
    notes: list[str] = []
    matrix = _parsed("nvidia-smi topo -m", wiring.nvidia_smi, cards, notes)
    dump = _parsed("NCCL's topology dump", wiring.nccl, cards, notes)
    try:
        return merge_node(matrix, dump), notes
    except RuleError as error:
        return matrix, [*notes, f"{error.rule}: {error.value}; nvidia-smi's is kept"]


def _parsed(what: str, text: str, cards: int, notes: list[str]) -> NodeTopology | None:
    if not text.strip():
        return None
    try:
        node = parse_nccl_topology(text) if what.startswith("NCCL") else parse_nvidia_smi_topology(text)
    except RuleError as error:
        notes.append(f"{what} is not understood: {error.rule} ({error.value})")
        return None
    if node.cards != cards:
        notes.append(f"{what} shows {node.cards} cards, the ranks had {cards}: its links are not kept")
        return None
    return node
