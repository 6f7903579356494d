"""Three lanes that work is queued on: into the device, on it, and out of it.

On CUDA the lanes are two copy streams and the caller's current stream, ordered by events; on the CPU each piece
of work runs when it is queued. A schedule is written once, as work, what it comes after, and what it marks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch

LaneName = Literal["in", "compute", "out"]
Mark = Any
"""A point on a lane, made by :meth:`Lanes.mark`; before it is first set, coming after it means nothing."""


class Lanes(Protocol):
    """Where an engine queues its work. Work on one lane runs in the order it was queued.

    Two threads may queue on the same lanes: whatever comes after a mark was queued later than what set it, so no
    order of theirs makes the lanes wait for each other.
    """

    def mark(self) -> Mark: ...

    def submit(
        self,
        lane: LaneName,
        work: Callable[[], object],
        after: Sequence[Mark] = (),
        done: Mark | None = None,
    ) -> None:
        """Queue ``work`` behind the last setting of every mark in ``after``; then set ``done``."""

    def host_wait(self, mark: Mark) -> None:
        """Hold the calling thread until ``mark``, as last set, is reached."""

    def drain(self) -> None:
        """Hold the calling thread until all that was queued is done."""


class InlineLanes:
    """The CPU's lanes: work runs at once, so everything it comes after is already done."""

    def mark(self) -> Mark:
        return None

    def submit(
        self,
        lane: LaneName,
        work: Callable[[], object],
        after: Sequence[Mark] = (),
        done: Mark | None = None,
    ) -> None:
        del lane, after, done
        work()

    def host_wait(self, mark: Mark) -> None:
        del mark

    def drain(self) -> None:
        return


class CudaLanes:
    """Two copy streams of one device around the stream that is current when work is queued."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.inbound = torch.cuda.Stream(device)
        self.outbound = torch.cuda.Stream(device)
        # Memory handed to the lanes may have a past on the stream it was allocated on.
        self.inbound.wait_stream(torch.cuda.current_stream(device))
        self.outbound.wait_stream(torch.cuda.current_stream(device))

    def mark(self) -> Mark:
        # Whoever waits for one sleeps: a host pass needs every core.
        return torch.cuda.Event(blocking=True)

    def submit(
        self,
        lane: LaneName,
        work: Callable[[], object],
        after: Sequence[Mark] = (),
        done: Mark | None = None,
    ) -> None:
        stream = self._stream(lane)
        for mark in after:
            stream.wait_event(mark)
        with torch.cuda.stream(stream):
            work()
            if done is not None:
                done.record(stream)

    def host_wait(self, mark: Mark) -> None:
        mark.synchronize()

    def drain(self) -> None:
        for lane in ("in", "compute", "out"):
            self._stream(lane).synchronize()

    def _stream(self, lane: str) -> torch.cuda.Stream:
        if lane == "compute":
            return torch.cuda.current_stream(self.device)
        return self.inbound if lane == "in" else self.outbound


def lanes_for(device: torch.device) -> Lanes:
    """The lanes of a device. Copies into memory that was allocated before this call are safe."""
    return CudaLanes(device) if device.type == "cuda" else InlineLanes()
