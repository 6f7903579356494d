"""How the cards of this node are joined: ``nvidia-smi topo -m``, and the dump NCCL writes as a group comes up."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cost_model.errors import RuleError
from cost_model.topology import NodeTopology
from cost_model.topology_import import merge_node, parse_nvidia_smi_topology
from cost_model.topology_nccl import parse_nccl_topology

_COMMAND_S = 20.0
_VARIABLE = "NCCL_TOPO_DUMP_FILE"


@dataclass(frozen=True, slots=True)
class Wiring:
    """The text of both tools, as far as there is any."""

    nvidia_smi: str = ""
    nccl: str = ""


@contextmanager
def dumping(device: str, *, leads: bool) -> Iterator[Path | None]:
    """On CUDA, have NCCL describe the node to a file when the next group comes up; its first rank ``leads``."""
    if device != "cuda" or not leads or _VARIABLE in os.environ:
        own = os.environ.get(_VARIABLE) if device == "cuda" and leads else None
        yield Path(own) if own else None  # a file of the user's own is read, not moved
        return
    with tempfile.TemporaryDirectory(prefix="flatpeak-wiring-") as folder:
        file = Path(folder) / "topology.xml"
        os.environ[_VARIABLE] = str(file)
        try:
            yield file
        finally:
            del os.environ[_VARIABLE]


def read_wiring(device: str, dump: Path | None) -> Wiring:
    """What both tools say by now; nothing on the CPU."""
    if device != "cuda":
        return Wiring()
    try:
        said = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=_COMMAND_S, check=False
        )
        matrix = said.stdout if said.returncode == 0 else ""
    except (OSError, subprocess.TimeoutExpired):
        matrix = ""
    try:
        nccl = dump.read_text(encoding="utf-8", errors="replace") if dump is not None else ""
    except OSError:
        nccl = ""
    return Wiring(matrix, nccl)


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
