"""Lanes that run late and out of step, as streams may: work is held until somebody has to wait for it.

Each lane keeps its own order; between lanes only the marks order anything. What a schedule forgot to wait for is
done too early or too late here, on the CPU, as it may be on a device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from threading import RLock
from typing import Literal

Slow = Literal["in", "compute", "out", "random"]


@dataclass
class HeldMark:
    """The last work that set this mark, by number; -1 before any did."""

    set_by: int = -1


class HeldLanes:
    """Work runs when it must. ``slow`` names the lane that runs only when nothing else can.

    Args:
        forget: drop every dependency between lanes, to show that a forgotten one is seen.
    """

    def __init__(self, slow: Slow, seed: int = 0, *, forget: bool = False) -> None:
        self._slow, self._random, self._forget = slow, Random(seed), forget
        self._lanes: dict[str, deque[tuple[Callable[[], object], list[int], int]]] = {
            name: deque() for name in ("in", "compute", "out")
        }
        self._queued = 0
        self._lock = RLock()  # split queues from two threads
        self._done: set[int] = set()

    @property
    def ran(self) -> int:
        """Pieces of work that were run so far."""
        return len(self._done)

    @property
    def left(self) -> int:
        """Pieces of work that still wait."""
        return self._queued - len(self._done)

    def mark(self) -> HeldMark:
        return HeldMark()

    def submit(
        self,
        lane: str,
        work: Callable[[], object],
        after: Sequence[HeldMark] = (),
        done: HeldMark | None = None,
    ) -> None:
        with self._lock:
            needs = [] if self._forget else [m.set_by for m in after if m.set_by >= 0]
            self._lanes[lane].append((work, needs, self._queued))
            if done is not None:
                done.set_by = self._queued
            self._queued += 1

    def host_wait(self, mark: HeldMark) -> None:
        with self._lock:
            while mark.set_by >= 0 and mark.set_by not in self._done:
                self._run_one()

    def drain(self) -> None:
        with self._lock:
            while any(self._lanes.values()):
                self._run_one()

    def _run_one(self) -> None:
        ready = [n for n, q in self._lanes.items() if q and self._done.issuperset(q[0][1])]
        assert ready, "the lanes wait for each other"
        others = [name for name in ready if name != self._slow]
        work, _, number = self._lanes[self._random.choice(others or ready)].popleft()
        work()
        self._done.add(number)
