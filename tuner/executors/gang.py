"""A gang: the processes of one group of ranks on this machine, and the pipes to them."""

from __future__ import annotations

import multiprocessing as mp
import os
import shutil
import tempfile
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

from tuner.executors.base import GangTask
from tuner.executors.deaths import kernel_oom_kills, why_died
from tuner.executors.place import Place
from tuner.executors.rank_process import serve
from tuner.executors.supervisor import Message

# The last two take a second each, and a rank would load them in its first measurement.
_PRELOAD = [
    *("torch", "torch.distributed", "operators.ranks", "tuner.executors.rank_process"),
    *("tuner.measure", "torch._dynamo"),
]
_LOG_TAIL_BYTES = 8_000


class LocalGang:
    """``ranks`` processes in one group. They end with :meth:`kill`, or with this process."""

    nodes = 1

    def __init__(self, ranks: int, device: str) -> None:
        self.ranks, self.device = ranks, device
        self._kills = kernel_oom_kills()
        # A fork of a process that has so much as counted the cards cannot use them, and what is preloaded may.
        context: Any = mp.get_context("spawn" if device == "cuda" else "forkserver")
        if device != "cuda":
            context.set_forkserver_preload(_PRELOAD)
        self._folder = Path(tempfile.mkdtemp(prefix="flatpeak-gang-"))
        threads = max(1, (os.cpu_count() or 1) // ranks)
        self.pipes: list[Connection] = []
        self._lifelines: list[Connection] = []
        self._processes: list[Any] = []
        self._log_starts = [0] * ranks
        for rank in range(ranks):
            place = Place(
                rank=rank,
                world_size=ranks,
                device=device,
                threads=threads,
                local_rank=rank,
                local_world_size=ranks,
                card=rank if device == "cuda" else None,
                store=str(self._folder / "store"),
                log=str(self._log(rank)),
            )
            ours, theirs = context.Pipe()
            end, lifeline = context.Pipe()
            process = context.Process(target=serve, args=(place, theirs, lifeline), daemon=True)
            process.start()
            theirs.close()
            lifeline.close()
            self.pipes.append(ours)
            self._lifelines.append(end)
            self._processes.append(process)

    def send(self, task: GangTask) -> None:
        """Give every rank the task. A rank that is gone is noticed by :meth:`receive`."""
        self._kills = kernel_oom_kills()
        self._log_starts = [self._log_size(rank) for rank in range(self.ranks)]
        for pipe in self.pipes:
            try:
                pipe.send((task.function, task.payload, task.host_limit_bytes))
            except OSError:
                continue

    def receive(self, pending: set[int], timeout_s: float) -> list[tuple[int, Message]]:
        """What the ranks of ``pending`` say within ``timeout_s``; of a dead one, why it died."""
        heard: list[tuple[int, Message]] = []
        ready = set(wait([self.pipes[r] for r in pending], timeout=max(0.0, timeout_s)))
        for rank in sorted(pending):
            if self.pipes[rank] not in ready:
                continue
            try:
                heard.append((rank, self.pipes[rank].recv()))
            except (EOFError, OSError):
                self._processes[rank].join(timeout=5)
                heard.append((rank, ("error", *why_died(self._processes[rank].exitcode, self._kills))))
        return heard

    def alive(self) -> bool:
        # ranks say nothing between tasks: one that is heard has died
        return not self.receive(set(range(self.ranks)), 0.0)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def log_tail(self, rank: int | None = None) -> str:
        """The end of what one rank, or every rank, has printed since the last task was given."""
        parts = []
        for r in range(self.ranks) if rank is None else [rank]:
            path = self._log(r)
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
        for process in self._processes:
            process.terminate()
        until = monotonic() + grace_s
        for process in self._processes:
            process.join(timeout=max(0.0, until - monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        for connection in [*self.pipes, *self._lifelines]:
            connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _log_size(self, rank: int) -> int:
        path = self._log(rank)
        return path.stat().st_size if path.exists() else 0

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"
