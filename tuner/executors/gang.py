"""The ranks of a gang on one machine: its processes, and the pipes to them."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

from tuner.executors.base import GangTask
from tuner.executors.deaths import kernel_oom_kills, why_died
from tuner.executors.folder import GangFolder
from tuner.executors.line import Line
from tuner.executors.place import Place
from tuner.executors.rank_entry import serve
from tuner.executors.supervisor import Message
from tuner.machine.cores import usable_cores

# The last two take a second each, and a rank would load them in its first measurement.
_PRELOAD = [
    *("torch", "torch.distributed", "operators.ranks", "tuner.executors.rank_process"),
    "tuner.executors.rank_entry",
    *("tuner.measuring.measure", "torch._dynamo"),
]
_LOG_TAIL_BYTES = 8_000
_REAP_S = 10.0


class NodeRanks:
    """One process for each place. They end with :meth:`kill`, or with this process.

    Args:
        meet_here: they meet over a file, all of the gang being on this machine.
    """

    def __init__(self, places: Sequence[Place], *, meet_here: bool = False) -> None:
        self._folder = GangFolder()
        self._kills = kernel_oom_kills()
        self._lines: dict[int, Line] = {}
        self._lifelines: list[Connection] = []
        self._processes: dict[int, Any] = {}
        self._ended: set[int] = set()
        self._log_starts = {place.rank: 0 for place in places}
        try:
            for place in places:
                self._start(place, meet_here)
        except BaseException:
            self.kill(0.0)
            raise

    def _start(self, place: Place, meet_here: bool) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        store = str(self._folder.store) if meet_here else None
        placed = replace(place, log=str(self._folder.log(place.rank)), store=store)
        self._lines[place.rank], theirs = Line.pair()
        with theirs:
            end, lifeline = context.Pipe()
            self._lifelines.append(end)
            with lifeline:
                process = context.Process(target=serve, args=(placed, theirs, lifeline), daemon=True)
                process.start()
        self._processes[place.rank] = process

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def tell(self, message: Message, *, but: int | None = None) -> None:
        """Say something to every rank, or to all ``but`` one. One that is gone is noticed by :meth:`receive`."""
        self._kills = kernel_oom_kills()
        self._log_starts = {rank: self._log_size(rank) for rank in self._lines}
        for rank, line in self._lines.items():
            if rank != but:
                with suppress(OSError):
                    line.say(message)

    def talking(self) -> set[int]:
        """Ranks that may still say something."""
        return set(self._lines) - self._ended

    def receive(self, pending: set[int], timeout_s: float) -> list[tuple[int, Message]]:
        """What the ranks of ``pending`` say within ``timeout_s``; of a dead one, once, why it died."""
        until = monotonic() + max(0.0, timeout_s)
        while True:
            listening = sorted(pending & self.talking())
            # a child of a rank may hold the rank's end of the line: that the process ended is asked too
            lines = {rank: self._lines[rank].fileno() for rank in listening}
            ends = {rank: int(self._processes[rank].sentinel) for rank in listening}
            ready = wait([*lines.values(), *ends.values()], timeout=max(0.0, until - monotonic()))
            heard = [
                (rank, message)
                for rank in listening
                if lines[rank] in ready or ends[rank] in ready
                for message in self._hear(rank, ends[rank] in ready)
            ]
            if heard or monotonic() >= until:  # part of a message may have come
                return heard

    def _hear(self, rank: int, ended: bool) -> list[Message]:
        try:
            said, gone = self._lines[rank].hear()
        except ValueError as error:
            self._ended.add(rank)
            return [("error", "raised", f"it sent something that is no message: {error}")]
        if gone or (ended and not said):
            self._ended.add(rank)
            self._processes[rank].join(timeout=5)
            said.append(("error", *why_died(self._processes[rank].exitcode, self._kills)))
        return said

    def alive(self) -> bool:
        """Whether every process runs.

        A line ends with its process; that the process was reaped is told later, by the server it was forked from.
        """
        running = all(process.is_alive() for process in self._processes.values())
        return running and not self._ended and not any(line.at_end() for line in self._lines.values())

    def log_tail(self, rank: int | None = None) -> str:
        """The end of what one rank, or every rank, has printed since it was last told something."""
        parts = []
        for r in self._lines if rank is None else [rank]:
            try:
                with self._folder.log(r).open("rb") as log:
                    log.seek(max(self._log_starts[r], self._log_size(r) - _LOG_TAIL_BYTES))
                    said = log.read(_LOG_TAIL_BYTES).decode(errors="replace").strip()
            except OSError:
                continue
            if said:
                parts.append(f"rank {r}:\n{said}")
        return "\n".join(parts)[-_LOG_TAIL_BYTES * 2 :]

    def kill(self, grace_s: float) -> None:
        """End every process, at the latest ``grace_s`` after it was asked to, and remove the gang's files."""
        self.end(grace_s)
        self.forget()

    def end(self, grace_s: float) -> None:
        """End every process and the children it left; whoever is in :meth:`receive` is woken."""
        for process in self._processes.values():
            process.terminate()
        until = monotonic() + grace_s
        for process in self._processes.values():
            process.join(timeout=max(0.0, until - monotonic()))
            if process.is_alive():
                process.kill()
                process.join(timeout=_REAP_S)
            _end_children(process.pid)

    def forget(self) -> None:
        """Close the pipes and remove the files, when nobody is in :meth:`receive` any more."""
        for process in self._processes.values():
            with suppress(ValueError):  # the kernel has not let go of it
                process.close()
        for line in self._lines.values():
            line.close()
        for lifeline in self._lifelines:
            lifeline.close()
        self._folder.remove()

    def _log_size(self, rank: int) -> int:
        path = self._folder.log(rank)
        return path.stat().st_size if path.exists() else 0


class LocalGang(NodeRanks):
    """A whole gang on this machine; its ranks meet over a file."""

    nodes = 1

    def __init__(self, ranks: int, device: str, hardware_id: str) -> None:
        self.ranks, self.device, self.hardware_id = ranks, device, hardware_id
        threads = max(1, usable_cores() // ranks)
        super().__init__(
            [
                Place(
                    rank=rank,
                    world_size=ranks,
                    device=device,
                    threads=threads,
                    local_rank=rank,
                    local_world_size=ranks,
                )
                for rank in range(ranks)
            ],
            meet_here=True,
        )

    def send(self, task: GangTask) -> None:
        """Give every rank the task."""
        self.tell((task.function, task.payload, task.host_limit_bytes))


def _end_children(leader: int) -> None:
    """Kill what is left of a rank's process group, which it leads."""
    try:
        os.kill(leader, 0)
    except (
        ProcessLookupError
    ):  # it is gone; while its group has members the kernel gives its number to nobody
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
    except PermissionError:
        return
