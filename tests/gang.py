"""Warm gloo ranks for tests.

``gang(4).run(function, *args)`` calls ``function(ranks, *args)`` on four processes that stay up for the whole
test session (an import of torch costs more than most tests) and returns the four results. ``function`` must
be a module-level function of an importable test module. A rank that raises fails the test with its
traceback; a rank that hangs is killed after ``timeout_s`` and the gang is thrown away.
"""

from __future__ import annotations

import atexit
import multiprocessing as mp
import shutil
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

_PRELOAD = ["torch", "torch.distributed", "operators.ranks"]
_gangs: dict[int, Gang] = {}


class RankFailed(AssertionError):
    """A rank raised or hung; carries every rank's traceback."""


def _serve(rank: int, size: int, store: str, timeout_s: float, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from operators.ranks import ProcessRanks

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    ranks = ProcessRanks()
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            break
        if call is None:
            break
        function, args, kwargs = call
        try:
            torch.manual_seed(0)
            pipe.send(("ok", function(ranks, *args, **kwargs)))
        except BaseException:  # the traceback travels to the test; the gang is discarded there
            pipe.send(("error", traceback.format_exc()))
    dist.destroy_process_group()


class Gang:
    """``size`` gloo ranks waiting for functions to run."""

    def __init__(self, size: int, collective_timeout_s: float = 60.0) -> None:
        self.size = size
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self._folder = tempfile.mkdtemp(prefix="gang")
        store = str(Path(self._folder) / "store")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, store, collective_timeout_s, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0, **kwargs: Any
    ) -> list[Any]:
        """Call ``function(ranks, *args, **kwargs)`` on every rank; results in rank order."""
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        answers: dict[int, tuple[str, Any]] = {}
        deadline = monotonic() + timeout_s
        while len(answers) < self.size:
            open_pipes = [p for r, p in enumerate(self._pipes) if r not in answers]
            ready = wait(open_pipes, timeout=max(0.0, deadline - monotonic()))
            if not ready:
                missing = sorted(set(range(self.size)) - set(answers))
                self.close(kill=True)
                raise RankFailed(f"ranks {missing} did not answer within {timeout_s} s; others: {answers}")
            for rank, pipe in enumerate(self._pipes):
                if pipe not in ready:
                    continue
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = ("error", "the rank died")
        failures = [f"rank {r}:\n{text}" for r, (kind, text) in sorted(answers.items()) if kind == "error"]
        if failures:
            self.close(kill=True)
            raise RankFailed("\n".join(failures))
        return [answers[r][1] for r in range(self.size)]

    def close(self, *, kill: bool = False) -> None:
        """End the ranks; a killed gang is replaced at the next ``gang(size)``."""
        _gangs.pop(self.size, None)
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if kill:
                process.kill()
            elif process.is_alive():
                pipe.send(None)
            process.join(timeout=10)
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def gang(size: int) -> Gang:
    """The warm gang of this size, started on first use."""
    if size not in _gangs:
        _gangs[size] = Gang(size)
    return _gangs[size]


@atexit.register
def _close_all() -> None:
    for one in list(_gangs.values()):
        one.close(kill=True)
