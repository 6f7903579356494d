"""The life of one task on a gang, the same for every executor: started, watched, ended, with one reason."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

from tuner.executors.base import OOM_KINDS, GangOutcome, GangTask, OutcomeKind, Progress

_POLL_S = 0.25
# When one rank fails, the others fail after it with "connection closed"; wait this long for better reasons,
# and longer where no rank has said anything better yet.
_GRACE_S = 1.0
_CAUSE_S = 10.0
# A round of the watch takes a poll; where it takes longer than this above it, this process did not run, and most
# likely the ranks did not either: a machine that was frozen, or far too busy.
_HELD_UP_S = 1.0
_KEEP_WARM: tuple[OutcomeKind, ...] = ("done", "invalid")

Message = tuple[Any, ...]
"""What a rank says: ``("ready",)``, ``("progress", JSON)``, ``("done", JSON)``, ``("error", kind, text)``.
A rank that is gone is heard once with an error too."""

Cancelled = Callable[[], bool]


class Gang(Protocol):
    """The processes of one group of ranks, and a way to talk to them."""

    @property
    def ranks(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def nodes(self) -> int: ...
    @property
    def hardware_id(self) -> str: ...

    def send(self, task: GangTask) -> None:
        """Give every rank the task. A rank that is gone is noticed by :meth:`receive`."""

    def receive(self, pending: set[int], timeout_s: float) -> list[tuple[int, Message]]:
        """What the ranks of ``pending`` say within ``timeout_s``, as soon as one of them says something."""

    def alive(self) -> bool:
        """Whether every rank waits for its next task."""

    def log_tail(self, rank: int | None = None) -> str:
        """The end of what one rank, or every rank, has printed since the last task was given."""

    def kill(self, grace_s: float) -> None:
        """End every process, at the latest ``grace_s`` after it was asked to, and remove what the gang made."""


class Unplaced(Exception):
    """There is no gang: the outcome says why."""

    def __init__(self, outcome: GangOutcome) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome


@dataclass
class _Watch:
    """What the supervisor knows of a running task."""

    pending: set[int]
    last_progress: dict[int, float]
    results: dict[int, Any] = field(default_factory=dict)
    failures: list[tuple[int, OutcomeKind, str]] = field(default_factory=list)

    def forgive(self, seconds: float) -> None:
        """Time that nobody can be blamed for."""
        for rank in self.last_progress:
            self.last_progress[rank] += seconds

    def take(self, rank: int, message: Message, on_progress: Progress | None) -> None:
        if rank not in self.pending:  # it has answered
            return
        match message:
            case ("progress", progress):
                self.last_progress[rank] = monotonic()
                if on_progress is not None:
                    on_progress(rank, progress)
            case ("done", result):
                self.pending.discard(rank)
                self.results[rank] = result
            case ("error", kind, text):
                self.pending.discard(rank)
                self.failures.append((rank, kind, text))


class GangExecutor(ABC):
    """Runs one task at a time on a gang that stays warm; see :class:`tuner.executors.base.Executor`."""

    def __init__(self) -> None:
        self._gang: Gang | None = None
        self._joining: set[int] = set()
        self._lock = threading.Lock()

    @abstractmethod
    def refusal(self, task: GangTask) -> str | None:
        """Why the task can never be placed here, or None."""

    @abstractmethod
    def make(self, task: GangTask, cancelled: Cancelled) -> Gang:
        """Processes for the task, not yet joined.

        Raises:
            Unplaced: there is no room for them now on the hardware asked for, or the wait for it was cancelled.
        """

    def retire(self, gang: Gang, grace_s: float) -> None:
        """End the ranks of a gang; an executor may keep what :meth:`make` can use again."""
        gang.kill(grace_s)

    def release(self) -> None:
        """Give back what :meth:`retire` kept: here nothing."""
        return

    def run(
        self,
        task: GangTask,
        *,
        on_progress: Progress | None = None,
        cancelled: Cancelled | None = None,
    ) -> GangOutcome:
        """Run the task on a warm gang of its size, or on a new one."""
        if (refusal := self.refusal(task)) is not None:
            return GangOutcome("unplaced", reason=refusal)
        asked = cancelled or (lambda: False)
        with self._lock:
            try:
                gang = self._warm(task, asked)
                outcome, idle = _supervise(gang, task, on_progress, asked)
                keep = idle and outcome.kind in _KEEP_WARM
            except Unplaced as unplaced:
                outcome = unplaced.outcome
                # who gives up a wait has nothing against the gang: it goes on coming up for the next task
                keep = outcome.kind == "cancelled"
            except BaseException:
                self._discard(task.timers.cancel_s)
                raise
            if not keep:
                self._discard(task.timers.cancel_s)
            return outcome

    def close(self) -> None:
        """End the warm gang."""
        with self._lock:
            self._discard(grace_s=2.0)
            self.release()

    def _discard(self, grace_s: float) -> None:
        gang, self._gang = self._gang, None
        if gang is not None:
            self.retire(gang, grace_s)

    def _warm(self, task: GangTask, cancelled: Cancelled) -> Gang:
        if (gang := self._gang) is not None:
            same = (gang.ranks, gang.device, gang.nodes) == (task.ranks, task.device, task.nodes)
            same = same and task.hardware_id in (None, gang.hardware_id)
            if not (same and gang.alive()):
                self._discard(task.timers.cancel_s)
        if self._gang is None:
            try:
                self._gang = self.make(task, cancelled)
            except (OSError, EOFError, RuntimeError) as error:  # no descriptors, no processes, no disk
                reason = f"its processes could not be started: {type(error).__name__}: {error}"
                raise Unplaced(GangOutcome("start", reason=reason)) from error
            self._joining = set(range(task.ranks))
        _join(self._gang, self._joining, task, cancelled)
        return self._gang


def _join(gang: Gang, pending: set[int], task: GangTask, cancelled: Cancelled) -> None:
    """Wait until the ``pending`` ranks have joined their group; those that have leave the set."""
    until = monotonic() + task.timers.start_s
    while pending:
        if cancelled():
            raise Unplaced(GangOutcome("cancelled", reason="cancelled", log_tail=gang.log_tail()))
        left = until - monotonic()
        heard = gang.receive(pending, min(_POLL_S, left))
        if not heard and left <= 0:
            reason = f"ranks {sorted(pending)} did not join within {task.timers.start_s:g} s"
            raise Unplaced(GangOutcome("start", reason=reason, log_tail=gang.log_tail()))
        for rank, message in heard:
            if message[0] != "ready":
                reason = f"rank {rank} did not join its group: {message[-1]}"
                raise Unplaced(GangOutcome("start", reason=reason, rank=rank, log_tail=gang.log_tail()))
            pending.discard(rank)


def _supervise(
    gang: Gang, task: GangTask, on_progress: Progress | None, cancelled: Cancelled
) -> tuple[GangOutcome, bool]:
    """The outcome, and whether every rank waits for its next task."""
    timers = task.timers
    began = monotonic()
    everyone = range(task.ranks)
    watch = _Watch(set(everyone), dict.fromkeys(everyone, began))
    gang.send(task)
    first_failure = grace_until = None
    last_look = began
    while watch.pending:
        now = monotonic()
        if grace_until is not None and now >= grace_until:
            break
        if grace_until is None:
            if cancelled():
                return GangOutcome("cancelled", reason="cancelled", log_tail=gang.log_tail()), False
            if now - began > timers.run_s:
                text = f"the task took longer than {timers.run_s:g} s"
                return GangOutcome("timeout", reason=text, log_tail=gang.log_tail()), False
        heard = gang.receive(
            watch.pending, _POLL_S if grace_until is None else min(_POLL_S, grace_until - now)
        )
        looked = monotonic()
        if (held_up := looked - last_look - _POLL_S) > _HELD_UP_S:
            watch.forgive(held_up)
        last_look = looked
        for rank, message in heard:
            watch.take(rank, message, on_progress)
        if watch.failures:
            first_failure = first_failure or monotonic()
            only_consequences = all(_is_consequence(kind, text) for _, kind, text in watch.failures)
            grace_until = first_failure + (_CAUSE_S if only_consequences else _GRACE_S)
        elif not heard:  # what waits to be heard is progress too, however long this process was held up
            slowest = min(watch.pending, key=lambda r: watch.last_progress[r])
            if monotonic() - watch.last_progress[slowest] > timers.stall_s:
                text = f"rank {slowest} made no progress for {timers.stall_s:g} s"
                return GangOutcome("stalled", reason=text, rank=slowest, log_tail=gang.log_tail()), False
    if watch.failures:
        outcome = _first_cause(watch.failures, gang)
    else:
        outcome = GangOutcome("done", results=[watch.results[r] for r in everyone], log_tail=gang.log_tail())
    return outcome, not watch.pending


def _first_cause(failures: list[tuple[int, OutcomeKind, str]], gang: Gang) -> GangOutcome:
    """Lack of memory explains the rest, then a dead process, then whoever failed first.

    A rank whose peer is gone raises too, about its connection: it is taken last. Where no rank says more than
    that, a peer is gone that nobody has seen die: nothing is known of the task.
    """

    def order(entry: tuple[int, tuple[int, OutcomeKind, str]]) -> tuple[int, int]:
        index, (_, kind, text) = entry
        weight = 3 if _is_consequence(kind, text) else 0 if kind in OOM_KINDS else 1 if kind == "died" else 2
        return weight, index

    rank, kind, text = min(enumerate(failures), key=order)[1]
    if _is_consequence(kind, text) and gang.ranks > 1:
        kind = "died"
    return GangOutcome(kind, reason=f"rank {rank}: {text}", rank=rank, log_tail=gang.log_tail(rank))


def _is_consequence(kind: OutcomeKind, text: str) -> bool:
    return kind == "raised" and _is_lost_peer(text)


def _is_lost_peer(text: str) -> bool:
    last = text.strip().splitlines()[-1].lower() if text.strip() else ""
    return any(
        word in last for word in ("connection", "gloo", "nccl", "socket", "disterror", "remote process")
    )
