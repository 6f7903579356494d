"""What a sweep asks of whoever runs its gangs: one task on so many ranks, and an outcome in any case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

OutcomeKind = Literal[
    "done",  # every rank returned
    "device_oom",  # a rank ran out of device memory
    "host_oom",  # a rank ran out of host memory: MemoryError, its limit, or the kernel's OOM killer
    "invalid",  # a rank refused the configuration (RuleError)
    "raised",  # a rank raised something else
    "died",  # a rank's process ended
    "stalled",  # no rank made progress
    "timeout",  # the task took longer than its whole allowance
    "unplaced",  # there was no room for the gang: nothing is known of the task
    "start",  # the gang did not come up
    "cancelled",
]

OOM_KINDS: tuple[OutcomeKind, ...] = ("device_oom", "host_oom")


@dataclass(frozen=True, slots=True)
class Timers:
    """How long each part of a task may take, in seconds.

    ``place_s`` is the wait for room on a cluster. ``stall_s`` counts from the last repetition that the
    slowest rank finished: a rank that hangs in a collective is alive but makes none.
    """

    start_s: float = 120.0
    run_s: float = 1800.0
    stall_s: float = 120.0
    cancel_s: float = 5.0
    place_s: float = 600.0


@dataclass(frozen=True, slots=True)
class GangTask:
    """A function for every rank of a gang.

    Attributes:
        function: ``module:name`` of ``f(ranks, payload, report) -> JSON``; ``report(progress)`` resets the
            stall timer.
        payload: JSON given to every rank.
        nodes: over so many nodes, evenly, contiguous ranks on one node; all on one by default.
        host_limit_bytes: most data memory (RLIMIT_DATA) that one rank may add while the task runs.
        hardware_id: only on nodes of this :attr:`Site.hardware_id`; on whatever the executor chooses by default.
    """

    function: str
    payload: dict[str, Any]
    ranks: int
    device: Literal["cpu", "cuda"] = "cpu"
    nodes: int = 1
    timers: Timers = field(default_factory=Timers)
    host_limit_bytes: int | None = None
    hardware_id: str | None = None


@dataclass(frozen=True, slots=True)
class GangOutcome:
    """How a task ended. ``results`` holds every rank's answer, in rank order, when ``kind`` is ``done``."""

    kind: OutcomeKind
    results: list[Any] = field(default_factory=list)
    reason: str = ""
    rank: int | None = None
    log_tail: str = ""

    @property
    def ok(self) -> bool:
        return self.kind == "done"


@dataclass(frozen=True, slots=True)
class Site:
    """What ranks of one device run on.

    Attributes:
        hardware_id: ``ClusterSpec.hardware_id`` of the node, with its network where a gang spans several.
        software: versions and settings there (``tuner.machine.fingerprint.local_software``), and the network's name.
        memory_bytes: of one card, or on the CPU of the node.
    """

    hardware_id: str
    software: dict[str, Any]
    memory_bytes: int

    def rank_bytes(self, device: str, ranks_per_node: int) -> int:
        """What one rank may have: a card, or its share of 95 % of the node's RAM (the rest is the system's)."""
        return self.memory_bytes if device == "cuda" else int(self.memory_bytes * 0.95) // ranks_per_node


class NoSite(Exception):
    """No node that is known has this device: what its ranks would run on cannot be said."""


Progress = Callable[[int, dict[str, Any]], None]
"""Called with a rank and what it reported."""


class Executor(Protocol):
    """Runs gangs. Never raises for what a rank does, never outlives its timers, leaves no process behind.

    A gang stays warm for the next task of its size, device, number of nodes and hardware; after anything but
    ``done`` and ``invalid`` it is thrown away.
    """

    def run(
        self,
        task: GangTask,
        *,
        on_progress: Progress | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> GangOutcome: ...

    def max_ranks(self, device: str) -> int:
        """Largest gang that can be placed on this device; 0 when it is not there."""

    def refusal(self, task: GangTask) -> str | None:
        """Why the task can never be placed here, or None."""

    def site(self, device: str, nodes: int = 1, hardware_id: str | None = None) -> Site:
        """What a gang of this device runs on, within one node or over several.

        Of the hardware that is named, where there is such; else of what it would run on if none were named.
        Where it may change, a task carries its ``hardware_id``: what it measures is then never of another kind.

        Raises:
            NoSite: no node that is known has the device.
        """

    def close(self) -> None:
        """End every gang."""
