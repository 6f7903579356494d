"""Ranks of a benchmark: one process a GPU (or a CPU), kept for one measurement after another.

A part that raises, dies or takes too long costs itself: the ranks are ended, and the next part starts new ones.
"""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import shutil
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from operators.ranks import ProcessRanks


class PartFailed(Exception):
    """What went wrong on which rank."""


class RankGang:
    """``size`` processes that call module-level functions ``f(ranks, payload)`` together.

    Args:
        device: ``cuda`` (NCCL, rank r on card r) or ``cpu`` (gloo).
        join: whether the ranks form their group at once; without it a function gets None and forms it itself.
    """

    def __init__(self, size: int, device: str, *, join: bool = True) -> None:
        self.size, self.device, self._join = size, device, join
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._folder: str | None = None

    def run(self, function: str, payload: dict[str, Any], timeout_s: float) -> list[Any]:
        """Every rank's answer, in rank order.

        Args:
            function: ``module:name``.

        Raises:
            PartFailed: a rank raised, died, or took longer than ``timeout_s`` (start of the ranks not counted).
        """
        self._start()
        for pipe in self._pipes:
            pipe.send((function, payload))
        return self._answers(timeout_s, function)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def __enter__(self) -> RankGang:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        if self._processes:
            return
        # spawned, not forked: a fork of a process that has looked at CUDA cannot use it
        context = mp.get_context("spawn")
        self._folder = tempfile.mkdtemp(prefix="flatpeak-ranks-")
        store = str(Path(self._folder) / "store")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=((rank, self.size, self.device, store), self._join, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers(180.0, "start")

    def _answers(self, timeout_s: float, what: str) -> list[Any]:
        answers: dict[int, Any] = {}
        until = monotonic() + timeout_s
        while len(answers) < self.size:
            waiting = {self._pipes[r]: r for r in range(self.size) if r not in answers}
            ready = wait(list(waiting), timeout=max(0.0, until - monotonic()))
            if not ready:
                self.close()
                raise PartFailed(f"{what}: ranks {sorted(waiting.values())} took longer than {timeout_s:g} s")
            for pipe, rank in waiting.items():
                if pipe not in ready:
                    continue
                try:
                    good, answer = pipe.recv()
                except (EOFError, OSError):
                    good, answer = False, "its process died"
                if not good:
                    self.close()
                    raise PartFailed(f"{what}: rank {rank}: {answer}")
                answers[rank] = answer
        return [answers[rank] for rank in range(self.size)]


def usable_cores() -> int:
    """Cores this process may use: its affinity, or a container's quota if that is less."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return cores


def join(rank: int, size: int, device: str, store: str) -> ProcessRanks:
    """Form the group of all ranks over a file."""
    options: dict[str, Any] = {}
    if device == "cuda":
        options["device_id"] = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(minutes=10),
        **options,
    )
    return ProcessRanks()


def _serve(place: tuple[int, int, str, str], join_now: bool, pipe: Connection) -> None:
    rank, size, device, store = place
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    torch.set_num_threads(max(1, usable_cores() // size))
    ranks: ProcessRanks | None = None
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        if join_now:
            ranks = join(rank, size, device, store)
            ranks.barrier()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        return
    pipe.send((True, None))
    while True:
        try:
            function, payload = pipe.recv()
        except EOFError:
            return
        module, _, name = function.partition(":")
        try:
            call = getattr(importlib.import_module(module), name)
            answer = (True, call(ranks, {**payload, "store": store}))
        except BaseException:  # told to the benchmark, which ends this process
            answer = (False, traceback.format_exc())
        pipe.send(answer)
