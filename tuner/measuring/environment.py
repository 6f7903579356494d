"""What surrounds a measurement: clocks and power of the cards, load of the host, and who else used either.

The first rank of each node watches its node (:class:`Watch`); :func:`environment_of` puts the answers of a gang
together and flags what casts doubt on its times.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
import torch

from tuner.machine.card_state import CardProcess, CardState, card_id, read_cards

HOST_SHARE = 0.25
"""Of a node's cores: more of them used by others flags a measurement ``busy_host``."""
CARD_SHARE = 0.20
"""A card that is busier than this before the gang begins is flagged ``busy_card``."""
OUTSIDE_BYTES = 6 * 2**30
"""What a gang's own context, NCCL and libraries may take of a card beside its allocator."""
_LEAST_CORE_S = 0.05  # the system counts in hundredths of a second
_QUIET_S = 1.0  # a card's utilisation is an average over up to a second
_SLOWDOWNS = ("hardware_slowdown", "thermal_slowdown", "hardware_thermal_slowdown", "power_brake")

_last_work = float("-inf")


@dataclass(frozen=True, slots=True)
class Flag:
    """A reason to doubt a measurement's times.

    ``busy_host``, ``shared_card``, ``busy_card``, ``card_memory`` say that others used the machine; ``slowed_down``
    and ``power_limited`` that a card did not run at its own clocks.
    """

    flag: str
    host: str
    detail: str


class Watch:
    """Watches from its making to :meth:`answer`, on every rank; the node's first one also asks about the cards."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._leads = os.environ.get("LOCAL_RANK", "0") == "0"
        self._after_own_work = monotonic() - _last_work < _QUIET_S
        self._before = read_cards() if self._cuda and self._leads else None
        self._busy, self._began, self._spent = _busy_s(), monotonic(), _own_s()

    def answer(self) -> dict[str, Any]:
        """What this rank knows, JSON: ``pid``, ``card``, ``cpu_s``, the card's memory, a first rank's ``node``."""
        global _last_work  # noqa: PLW0603 - one process, one rank
        _last_work = monotonic()
        seconds, busy, spent = monotonic() - self._began, _busy_s() - self._busy, _own_s() - self._spent
        found: dict[str, Any] = {
            "pid": os.getpid(),
            "card": None,
            "cpu_s": spent,
            "device_reserved_bytes": torch.cuda.memory_reserved() if self._cuda else None,
            "node": None,
        }
        if self._cuda:
            uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
            found["card"] = None if uuid is None else card_id(str(uuid))
        if self._leads:
            cores = psutil.cpu_count(logical=True) or 1
            found["node"] = {
                "host": socket.gethostname(),
                "seconds": seconds,
                "cores": cores,
                "busy_core_s": busy,
                "load_1m": os.getloadavg()[0],
                "cpu_clock_hz": _core_clock_hz(),
                "cpu_governor": _core_file("scaling_governor"),
                "family": [os.getpid(), *(parent.pid for parent in psutil.Process().parents())],
                "after_own_work": self._after_own_work,
                **self._cards(),
            }
        return found

    def _cards(self) -> dict[str, Any]:
        if self._before is None:
            return {"cards_before": [], "cards_after": [], "processes": []}
        cards, processes = read_cards()
        before, there_before = self._before
        return {
            "cards_before": [asdict(card) for card in before],
            "cards_after": [asdict(card) for card in cards],
            "processes": [asdict(one) for one in dict.fromkeys([*there_before, *processes])],
        }


def others_on_card() -> str | None:
    """After this rank's card ran out of memory: who else holds some of it, in words; None when nobody does."""
    if not torch.cuda.is_available():  # an operator on the CPU may say so too: its reason stays as it is
        return None
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    there = [one for one in read_cards()[1] if uuid is not None and one.uuid == card_id(str(uuid))]
    family = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    strangers, known = strangers_of(there, family, ranks=1)
    return _in_words(strangers, known=known) if strangers else None


def strangers_of(
    there: Sequence[CardProcess], family: set[int], ranks: int
) -> tuple[list[CardProcess], bool]:
    """Processes on a card that are not of the gang, and whether the numbers shown are this system's.

    Args:
        there: processes on the card.
        family: the gang's processes and those that started them.
        ranks: of the gang on this card.
    """
    # else these are another system's numbers, or none are shown
    known = any(one.pid in family for one in there)
    return ([one for one in there if one.pid not in family] if known else list(there[ranks:])), known


def _in_words(strangers: Sequence[CardProcess], *, known: bool) -> str:
    others = f"{len(strangers)} other process{'es' if len(strangers) > 1 else ''}"
    pids = f" ({', '.join(str(one.pid) for one in strangers[:4])})" if known else ""
    return f"{others}{pids}, {sum(one.used_bytes or 0 for one in strangers) / 2**30:.1f} GiB"


def environment_of(measured: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Flag]]:
    """Node by node what the ranks saw, and what casts doubt on it.

    Args:
        measured: answers of all ranks in their order; ``watch`` holds :meth:`Watch.answer`, ``device_used_bytes`` what
            the whole card had in use.
    """
    nodes, flags = [], []
    for group in _by_node(measured):
        node = group[0]["watch"]["node"]
        own = sum(one["watch"]["cpu_s"] for one in group)
        others = max(0.0, node["busy_core_s"] - own)
        share = others / max(node["seconds"] * node["cores"], 1e-9)
        seen = _cards(group)
        nodes.append(
            {
                name: node[name]
                for name in ("host", "seconds", "cores", "load_1m", "cpu_clock_hz", "cpu_governor")
            }
            | {"others_cpu_share": min(1.0, share), "cards": seen}
        )
        if share > HOST_SHARE and others > _LEAST_CORE_S:
            detail = f"others used {100 * min(1.0, share):.0f} % of its {node['cores']} cores"
            flags.append(Flag("busy_host", node["host"], detail))
        for card in seen:
            flags += _card_flags(
                node, card, [one for one in group if one["watch"]["card"] == card["uuid"]], group
            )
    return nodes, flags


def _by_node(measured: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Answers of each node: its first rank is the one that tells of the node."""
    group: list[Mapping[str, Any]] = []
    for one in measured:
        if one["watch"]["node"] is not None and group:
            yield group
            group = []
        if group or one["watch"]["node"] is not None:
            group.append(one)
    if group:
        yield group


def _cards(group: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The gang's cards before and after."""
    node = group[0]["watch"]["node"]
    ours = {one["watch"]["card"] for one in group}
    before = {card["uuid"]: card for card in node["cards_before"]}
    return [
        {"uuid": card["uuid"], "before": before.get(card["uuid"]), "after": card}
        for card in node["cards_after"]
        if card["uuid"] in ours
    ]


def _card_flags(
    node: Mapping[str, Any],
    card: Mapping[str, Any],
    on_it: Sequence[Mapping[str, Any]],
    group: Sequence[Mapping[str, Any]],
) -> Iterator[Flag]:
    host, after = node["host"], CardState(**card["after"])
    name = f"card {after.index}"
    family = {*node["family"], *(one["watch"]["pid"] for one in group)}
    there = [CardProcess(**one) for one in node["processes"] if one["uuid"] == card["uuid"]]
    strangers, known = strangers_of(there, family, len(on_it))
    if strangers:
        yield Flag("shared_card", host, f"{name}: {_in_words(strangers, known=known)}")
    used = max((one["device_used_bytes"] or 0 for one in on_it), default=0)
    beyond = used - sum(one["watch"]["device_reserved_bytes"] or 0 for one in on_it)
    if not known and beyond > OUTSIDE_BYTES * len(on_it):
        yield Flag(
            "card_memory", host, f"{name}: {beyond / 2**30:.1f} GiB in use beside the gang's allocator"
        )
    busy = None if card["before"] is None else card["before"]["busy_share"]
    if busy is not None and busy > CARD_SHARE and not node["after_own_work"]:
        yield Flag("busy_card", host, f"{name}: {100 * busy:.0f} % busy before the gang began")
    if slowed := [reason for reason in after.slowed_by if reason in _SLOWDOWNS]:
        yield Flag("slowed_down", host, f"{name}: {', '.join(slowed)}")
    limit, default = after.power_limit_w, after.default_power_limit_w
    if limit is not None and default is not None and limit < 0.98 * default:
        yield Flag("power_limited", host, f"{name}: {limit:.0f} W, by default {default:.0f} W")


def _busy_s() -> float:
    """Seconds that this machine's cores have been busy, added over them, whoever used them."""
    times = psutil.cpu_times()
    idle = ("idle", "iowait", "guest", "guest_nice")  # a guest's time is in user already
    return float(sum(value for name, value in times._asdict().items() if name not in idle))


def _core_file(name: str) -> str | None:
    """What the kernel says of the first core's frequency: asking every core takes seconds on large hosts."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu0/cpufreq/{name}").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _core_clock_hz() -> float | None:
    text = _core_file("scaling_cur_freq")
    return float(text) * 1e3 if text is not None and text.isdigit() else None


def _own_s() -> float:
    """Core seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])
