"""State of this node's cards as ``nvidia-smi`` tells it: clocks, power, what slows them down, who else is there.

``python -m tuner.machine.card_state`` prints it as JSON.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

COMMAND_S = 20.0
_FIELDS = (
    *("index", "uuid", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit"),
    *("power.default_limit", "temperature.gpu", "utilization.gpu", "memory.used", "memory.total"),
)
# drivers before 535 know the second name only
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
_BITS = {
    0x1: "idle",
    0x2: "application_clocks",
    0x4: "power_cap",
    0x8: "hardware_slowdown",
    0x10: "sync_boost",
    0x20: "thermal_slowdown",
    0x40: "hardware_thermal_slowdown",
    0x80: "power_brake",
    0x100: "display_clocks",
}


@dataclass(frozen=True, slots=True)
class CardState:
    """One card at one moment; None where the driver does not say. ``slowed_by`` names the reasons of its clocks."""

    index: int
    uuid: str
    sm_clock_hz: float | None
    memory_clock_hz: float | None
    max_sm_clock_hz: float | None
    power_w: float | None
    power_limit_w: float | None
    default_power_limit_w: float | None
    temperature_c: float | None
    busy_share: float | None
    used_bytes: int | None
    total_bytes: int | None
    slowed_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CardProcess:
    """A process that computes on a card. Inside a container its number may be another system's."""

    uuid: str
    pid: int
    used_bytes: int | None


def card_id(uuid: str) -> str:
    """A card's UUID in one spelling: ``nvidia-smi`` puts ``GPU-`` before it, torch does not."""
    return re.sub(r"^gpu-", "", uuid.strip().lower())


def parse_cards(text: str) -> list[CardState]:
    """Rows of ``nvidia-smi --query-gpu=… --format=csv,noheader,nounits``; others are left out."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_FIELDS) + 1 or not (cells[0].isascii() and cells[0].isdigit()):
            continue
        sm, memory, most, power, limit, default, heat, busy, used, total = map(_number, cells[2:12])
        found.append(
            CardState(
                index=int(cells[0]),
                uuid=card_id(cells[1]),
                sm_clock_hz=_times(sm, 1e6),
                memory_clock_hz=_times(memory, 1e6),
                max_sm_clock_hz=_times(most, 1e6),
                power_w=power,
                power_limit_w=limit,
                default_power_limit_w=default,
                temperature_c=heat,
                busy_share=_times(busy, 0.01),
                used_bytes=None if used is None else int(used * 2**20),
                total_bytes=None if total is None else int(total * 2**20),
                slowed_by=_reasons(cells[12]),
            )
        )
    return found


def parse_processes(text: str) -> list[CardProcess]:
    """Rows of ``nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory --format=csv,noheader,nounits``."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3 and cells[1].isascii() and cells[1].isdigit():
            used = _number(cells[2])
            found.append(
                CardProcess(card_id(cells[0]), int(cells[1]), None if used is None else int(used * 2**20))
            )
    return found


def read_cards() -> tuple[list[CardState], list[CardProcess]]:
    """Cards and the processes on them now; both empty where there is no ``nvidia-smi``."""
    processes = _start("--query-compute-apps=gpu_uuid,pid,used_memory")
    cards: list[CardState] = []
    for reasons in _REASONS:
        cards = parse_cards(_finish(_start(f"--query-gpu={','.join((*_FIELDS, reasons))}")))
        if cards:
            break
    return cards, parse_processes(_finish(processes))


def _number(cell: str) -> float | None:
    return float(cell) if re.fullmatch(r"\d{1,12}(\.\d{1,6})?", cell, re.ASCII) else None


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _reasons(cell: str) -> tuple[str, ...]:
    if not re.fullmatch(r"0x[0-9a-fA-F]{1,16}", cell):
        return ()
    mask = int(cell, 16)
    return tuple(name for bit, name in _BITS.items() if mask & bit)


def _start(query: str) -> subprocess.Popen[str] | None:
    command: Sequence[str] = ("nvidia-smi", query, "--format=csv,noheader,nounits")
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return None


def _finish(process: subprocess.Popen[str] | None) -> str:
    if process is None:
        return ""
    try:
        said, _ = process.communicate(timeout=COMMAND_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return ""
    return said if process.returncode == 0 else ""


if __name__ == "__main__":
    now, there = read_cards()
    json.dump(
        {"cards": [asdict(c) for c in now], "processes": [asdict(p) for p in there]}, sys.stdout, indent=2
    )
    sys.stdout.write("\n")
