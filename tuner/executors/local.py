"""Gangs on this machine: one real process a rank, gloo on the CPU, NCCL on CUDA cards."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from tuner.executors.base import OOM_KINDS, GangOutcome, GangTask, OutcomeKind, Progress
from tuner.executors.gang import Gang, Message

_POLL_S = 0.25
# When one rank fails, the others fail after it with "connection closed"; wait this long for better reasons.
_GRACE_S = 1.0
_KEEP_WARM: tuple[OutcomeKind, ...] = ("done", "invalid")


@dataclass
class _Watch:
    """What the supervisor knows of a running task."""

    pending: set[int]
    last_progress: dict[int, float]
    results: dict[int, Any] = field(default_factory=dict)
    failures: list[tuple[int, OutcomeKind, str]] = field(default_factory=list)


class LocalExecutor:
    """Runs one task at a time; see :class:`tuner.executors.base.Executor`.

    Ranks import the main module of the program, as ``multiprocessing`` does: a script that uses this needs
    ``if __name__ == "__main__":`` around what it runs.

    Args:
        max_cpu_ranks: largest gang on the CPU. Ranks may outnumber the cores: they take turns.
    """

    def __init__(self, max_cpu_ranks: int = 64) -> None:
        self._max_cpu_ranks = max_cpu_ranks
        self._gang: Gang | None = None
        self._lock = threading.Lock()

    def max_ranks(self, device: str) -> int:
        if device == "cuda":
            return torch.cuda.device_count() if torch.cuda.is_available() else 0
        return self._max_cpu_ranks

    def run(
        self,
        task: GangTask,
        *,
        on_progress: Progress | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> GangOutcome:
        limit = self.max_ranks(task.device)
        if task.ranks > limit:
            return GangOutcome(
                "invalid",
                reason=f"this machine has room for {limit} {task.device} ranks, not for {task.ranks}",
            )
        with self._lock:
            killed_before = _kernel_oom_kills()
            outcome = self._warm(task)
            if outcome is None:
                assert self._gang is not None
                outcome = self._supervise(self._gang, task, on_progress, cancelled, killed_before)
            if outcome.kind not in _KEEP_WARM:
                self._discard(task.timers.cancel_s)
            return outcome

    def close(self) -> None:
        with self._lock:
            self._discard(grace_s=2.0)

    def pids(self) -> list[int]:
        """Processes of the warm gang."""
        return [] if self._gang is None else self._gang.pids

    def _discard(self, grace_s: float) -> None:
        if self._gang is not None:
            self._gang.kill(grace_s)
            self._gang = None

    def _warm(self, task: GangTask) -> GangOutcome | None:
        """Have a gang of the task's size; an outcome when it does not come up."""
        if self._gang is not None:
            same = (self._gang.ranks, self._gang.device) == (task.ranks, task.device)
            # ranks say nothing between tasks: one that is heard now has died
            if same and not self._gang.receive(set(range(task.ranks)), 0.0):
                return None
            self._discard(task.timers.cancel_s)
        self._gang = Gang(task.ranks, task.device)
        pending = set(range(task.ranks))
        until = monotonic() + task.timers.start_s
        while pending:
            heard = self._gang.receive(pending, until - monotonic())
            if not heard:
                reason = f"ranks {sorted(pending)} did not join within {task.timers.start_s:g} s"
                return GangOutcome("start", reason=reason, log_tail=self._gang.log_tail())
            for rank, message in heard:
                if message[0] != "ready":
                    reason = f"rank {rank} did not join its group: {message[-1]}"
                    return GangOutcome("start", reason=reason, rank=rank, log_tail=self._gang.log_tail())
                pending.discard(rank)
        return None

    def _supervise(
        self,
        gang: Gang,
        task: GangTask,
        on_progress: Progress | None,
        cancelled: Callable[[], bool] | None,
        killed_before: int | None,
    ) -> GangOutcome:
        timers = task.timers
        began = monotonic()
        everyone = range(task.ranks)
        watch = _Watch(set(everyone), dict.fromkeys(everyone, began))
        gang.send(task)
        grace_until: float | None = None
        while watch.pending:
            now = monotonic()
            if grace_until is not None and now >= grace_until:
                break
            if grace_until is None:
                if cancelled is not None and cancelled():
                    return GangOutcome("cancelled", reason="cancelled", log_tail=gang.log_tail())
                if now - began > timers.run_s:
                    return _timed_out(gang, "timeout", f"the task took longer than {timers.run_s:g} s", None)
                slowest = min(watch.pending, key=lambda r: watch.last_progress[r])
                if now - watch.last_progress[slowest] > timers.stall_s:
                    text = f"rank {slowest} made no progress for {timers.stall_s:g} s"
                    return _timed_out(gang, "stalled", text, slowest)
            wait_s = _POLL_S if grace_until is None else min(_POLL_S, grace_until - now)
            for rank, message in gang.receive(watch.pending, wait_s):
                _take(watch, rank, message, on_progress, killed_before)
            if watch.failures and grace_until is None:
                grace_until = monotonic() + _GRACE_S
        if watch.failures:
            rank, kind, reason = _root_cause(watch.failures)
            return GangOutcome(kind, reason=f"rank {rank}: {reason}", rank=rank, log_tail=gang.log_tail(rank))
        return GangOutcome("done", results=[watch.results[r] for r in everyone], log_tail=gang.log_tail())


def _take(
    watch: _Watch, rank: int, message: Message, on_progress: Progress | None, killed_before: int | None
) -> None:
    match message:
        case ("progress", progress):
            watch.last_progress[rank] = monotonic()
            if on_progress is not None:
                on_progress(rank, progress)
        case ("done", result):
            watch.pending.discard(rank)
            watch.results[rank] = result
        case ("error", kind, text):
            watch.pending.discard(rank)
            watch.failures.append((rank, kind, text))
        case ("died", exit_code):
            watch.pending.discard(rank)
            watch.failures.append((rank, *_why_died(exit_code, killed_before)))


def _why_died(exit_code: int | None, killed_before: int | None) -> tuple[OutcomeKind, str]:
    if exit_code is None or exit_code >= 0:
        return "died", f"its process ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    kills = _kernel_oom_kills()
    if -exit_code == signal.SIGKILL and None not in (kills, killed_before) and kills != killed_before:
        return "host_oom", "the kernel killed it for lack of host memory"
    return "died", f"its process was killed by {name}"


def _root_cause(failures: list[tuple[int, OutcomeKind, str]]) -> tuple[int, OutcomeKind, str]:
    """Lack of memory explains the rest, then a dead process, then whoever failed first.

    A rank whose peer is gone raises too, about its connection: it is taken last.
    """

    def order(entry: tuple[int, tuple[int, OutcomeKind, str]]) -> tuple[int, int]:
        index, (_, kind, text) = entry
        consequence = kind == "raised" and _is_lost_peer(text)
        weight = 0 if kind in OOM_KINDS else 1 if kind == "died" else 3 if consequence else 2
        return weight, index

    return min(enumerate(failures), key=order)[1]


def _is_lost_peer(text: str) -> bool:
    last = text.strip().splitlines()[-1].lower() if text.strip() else ""
    return any(
        word in last for word in ("connection", "gloo", "nccl", "socket", "disterror", "remote process")
    )


def _timed_out(gang: Gang, kind: OutcomeKind, reason: str, rank: int | None) -> GangOutcome:
    return GangOutcome(kind, reason=reason, rank=rank, log_tail=gang.log_tail())


def _kernel_oom_kills() -> int | None:
    """How many processes the kernel has killed for lack of memory: in this control group, else anywhere."""
    for path, key in (("/sys/fs/cgroup/memory.events", "oom_kill"), ("/proc/vmstat", "oom_kill")):
        try:
            lines = Path(path).read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, count = line.partition(" ")
            if name == key:
                return int(count)
    return None


def cpu_share_bytes(ranks: int) -> int:
    """One rank's share of this machine's RAM (95 % of it: the rest is the system's)."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(total * 0.95) // ranks
