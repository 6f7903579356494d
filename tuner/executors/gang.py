"""The ranks of a gang on one machine: its processes, and the pipes to them."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

from tuner.executors.base import GangTask
from tuner.executors.deaths import kernel_oom_kills, why_died
from tuner.executors.folder import GangFolder
from tuner.executors.place import Place
from tuner.executors.rank_entry import serve
from tuner.executors.supervisor import Message

# The last two take a second each, and a rank would load them in its first measurement.
_PRELOAD = [
    *("torch", "torch.distributed", "operators.ranks", "tuner.executors.rank_process"),
    "tuner.executors.rank_entry",
    *("tuner.measure", "torch._dynamo"),
]
_LOG_TAIL_BYTES = 8_000


class NodeRanks:
    """One process for each place. They end with :meth:`kill`, or with this process.

    Args:
        meet_here: they meet over a file, all of the gang being on this machine.
    """

    def __init__(self, places: Sequence[Place], *, meet_here: bool = False) -> None:
        self._folder = GangFolder()
        self._kills = kernel_oom_kills()
        self._pipes: dict[int, Connection] = {}
        self._lifelines: list[Connection] = []
        self._processes: dict[int, Any] = {}
        self._ended: set[int] = set()
        self._log_starts = {place.rank: 0 for place in places}
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        for place in places:
            store = str(self._folder.store) if meet_here else None
            placed = replace(place, log=str(self._folder.log(place.rank)), store=store)
            ours, theirs = context.Pipe()
            end, lifeline = context.Pipe()
            process = context.Process(target=serve, args=(placed, theirs, lifeline), daemon=True)
            process.start()
            theirs.close()
            lifeline.close()
            self._pipes[place.rank] = ours
            self._lifelines.append(end)
            self._processes[place.rank] = process

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def tell(self, message: Message, *, but: int | None = None) -> None:
        """Say something to every rank, or to all ``but`` one. One that is gone is noticed by :meth:`receive`."""
        self._kills = kernel_oom_kills()
        self._log_starts = {rank: self._log_size(rank) for rank in self._pipes}
        for rank, pipe in self._pipes.items():
            try:
                if rank != but:
                    pipe.send(message)
            except OSError:
                continue

    def talking(self) -> set[int]:
        """Ranks that may still say something."""
        return set(self._pipes) - self._ended

    def receive(self, pending: set[int], timeout_s: float) -> list[tuple[int, Message]]:
        """What the ranks of ``pending`` say within ``timeout_s``; of a dead one, once, why it died."""
        heard: list[tuple[int, Message]] = []
        listening = {rank: self._pipes[rank] for rank in sorted(pending & self.talking())}
        ready = set(wait(list(listening.values()), timeout=max(0.0, timeout_s)))
        for rank, pipe in listening.items():
            if pipe not in ready:
                continue
            try:
                heard.append((rank, pipe.recv()))
            except (EOFError, OSError):
                self._ended.add(rank)
                self._processes[rank].join(timeout=5)
                heard.append((rank, ("error", *why_died(self._processes[rank].exitcode, self._kills))))
        return heard

    def alive(self) -> bool:
        """Whether every process runs.

        A pipe ends with its process; that the process was reaped is told later, by the server it was forked from.
        """
        running = all(process.is_alive() for process in self._processes.values())
        return running and not self._ended and not any(_at_end(pipe) for pipe in self._pipes.values())

    def log_tail(self, rank: int | None = None) -> str:
        """The end of what one rank, or every rank, has printed since it was last told something."""
        parts = []
        for r in self._pipes if rank is None else [rank]:
            path = self._folder.log(r)
            if not path.exists():
                continue
            with path.open("rb") as log:
                log.seek(max(self._log_starts[r], self._log_size(r) - _LOG_TAIL_BYTES))
                said = log.read().decode(errors="replace").strip()
            if said:
                parts.append(f"rank {r}:\n{said}")
        return "\n".join(parts)[-_LOG_TAIL_BYTES * 2 :]

    def kill(self, grace_s: float) -> None:
        """End every process, at the latest ``grace_s`` after it was asked to, and remove the gang's files."""
        self.end(grace_s)
        self.forget()

    def end(self, grace_s: float) -> None:
        """End every process; whoever is in :meth:`receive` is woken."""
        for process in self._processes.values():
            process.terminate()
        until = monotonic() + grace_s
        for process in self._processes.values():
            process.join(timeout=max(0.0, until - monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def forget(self) -> None:
        """Close the pipes and remove the files, when nobody is in :meth:`receive` any more."""
        for process in self._processes.values():
            process.close()
        for connection in [*self._pipes.values(), *self._lifelines]:
            connection.close()
        self._folder.remove()

    def _log_size(self, rank: int) -> int:
        path = self._folder.log(rank)
        return path.stat().st_size if path.exists() else 0


class LocalGang(NodeRanks):
    """A whole gang on this machine; its ranks meet over a file."""

    nodes = 1

    def __init__(self, ranks: int, device: str, hardware_id: str) -> None:
        self.ranks, self.device, self.hardware_id = ranks, device, hardware_id
        threads = max(1, (os.cpu_count() or 1) // ranks)
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


def _at_end(pipe: Connection) -> bool:
    """Whether the other side is gone and everything it said was read; nothing is taken from the pipe."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as both_ways:
        try:
            return both_ways.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True
