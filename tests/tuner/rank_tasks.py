"""What the ranks of executor tests do: work, raise, die, hang, run out of memory."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from operators.errors import RuleError
from operators.ranks import Ranks
from tuner.measure import measure_rank

Report = Callable[[dict[str, Any]], None]


def add(ranks: Ranks, payload: dict[str, Any], report: Report) -> dict[str, Any]:
    total = torch.tensor([float(payload["value"]) + ranks.rank])
    report({"phase": "adding"})
    ranks.all_reduce(total)
    print(f"rank {ranks.rank} has added")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")
    return {"total": float(total), "pid": os.getpid(), "env": {name: os.environ[name] for name in names}}


def where(ranks: Ranks, payload: dict[str, Any], report: Report) -> dict[str, Any]:
    """Where the rank stands, and whether Ray was loaded into it."""
    ranks.barrier()
    return {"local_rank": os.environ["LOCAL_RANK"], "ray": "ray" in sys.modules}


def misbehave(ranks: Ranks, payload: dict[str, Any], report: Report) -> None:
    """Rank 1 does what ``payload`` says; the others wait for it in a collective."""
    report({"phase": "begin"})
    if ranks.rank == 1:
        print("rank 1 is about to misbehave", flush=True)
        _ACTS[payload["act"]]()
    ranks.all_reduce(torch.ones(1))


def misbehave_later(ranks: Ranks, payload: dict[str, Any], report: Report) -> None:
    """Rank 1 does what ``payload`` says once its report must have been heard."""
    report({"phase": "begin"})
    time.sleep(1.0)
    misbehave(ranks, payload, lambda progress: None)


def keep_reporting(ranks: Ranks, payload: dict[str, Any], report: Report) -> None:
    while True:
        report({"phase": "busy"})
        time.sleep(0.05)


def refuse(ranks: Ranks, payload: dict[str, Any], report: Report) -> None:
    raise RuleError(rule="nothing is right", value=payload, remedy="Ask for something else.")


def refuse_alone(ranks: Ranks, payload: dict[str, Any], report: Report) -> None:
    """Rank 1 refuses; the others wait for it in a collective."""
    if ranks.rank == 1:
        raise RuleError(rule="rank 1 is never right", value=1, remedy="Ask another.")
    ranks.all_reduce(torch.ones(1))


def lose_peers(ranks: Ranks, payload: dict[str, Any], report: Report) -> None:
    """What every rank says when one that nobody watches is gone."""
    raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234")


def allocate(ranks: Ranks, payload: dict[str, Any], report: Report) -> int:
    return int(torch.ones(payload["bytes"], dtype=torch.uint8).sum())


def measure_quietly(ranks: Ranks, payload: dict[str, Any]) -> dict[str, Any]:
    return measure_rank(ranks, payload, lambda progress: None)


def _raise() -> None:
    raise ValueError("rank 1 is ill")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _exit() -> None:
    os._exit(3)


def _hang() -> None:
    time.sleep(3600)


def _memory_error() -> None:
    raise MemoryError


def _device_oom() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore text")


_ACTS: dict[str, Callable[[], None]] = {
    "raise": _raise,
    "kill": _kill,
    "exit": _exit,
    "hang": _hang,
    "memory_error": _memory_error,
    "device_oom": _device_oom,
}
