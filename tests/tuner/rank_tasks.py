"""What the ranks of executor tests do: work, raise, die, hang, run out of memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from operators.errors import RuleError
from operators.ranks import Ranks
from tuner.measuring.measure import measure_rank

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


class Unreadable:
    """Falls apart when it is read."""

    def __reduce__(self) -> tuple[type[int], tuple[str]]:
        return int, ("no number",)


def answer(ranks: Ranks, payload: dict[str, Any], report: Report) -> Any:
    """Answers that no supervisor can read."""
    return Unreadable() if payload["act"] == "unreadable" else lambda: None


def leave_children(ranks: Ranks, payload: dict[str, Any], report: Report) -> None:
    """Rank 1 leaves two children, one of which holds all its files, and ends as ``payload`` says."""
    if ranks.rank == 1:
        if (forked := os.fork()) == 0:
            time.sleep(600)
            os._exit(0)
        started = subprocess.Popen(["sleep", "600"])
        report({"children": [forked, started.pid]})
        _ACTS[payload["act"]]()
    ranks.all_reduce(torch.ones(1))


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


def _realtime_signal() -> None:
    os.kill(os.getpid(), 40)


def _line() -> Connection:
    frame = sys._getframe()
    while not isinstance(found := frame.f_locals.get("pipe"), Connection):
        assert frame.f_back is not None
        frame = frame.f_back
    return found


def _garbage() -> None:
    _line().send_bytes(b"not a pickle")
    _hang()


def _half() -> None:
    os.write(_line().fileno(), b"\x00\x00\x10\x00abc")
    _hang()


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def _unspeakable() -> None:
    raise UnspeakableError


def _without_log() -> None:
    os.close(1)
    os.close(2)
    sys.stdout.close()
    sys.stderr.close()
    raise ValueError("rank 1 is ill")


_ACTS: dict[str, Callable[[], None]] = {
    "raise": _raise,
    "kill": _kill,
    "exit": _exit,
    "hang": _hang,
    "memory_error": _memory_error,
    "device_oom": _device_oom,
    "realtime_signal": _realtime_signal,
    "garbage": _garbage,
    "half": _half,
    "unspeakable": _unspeakable,
    "without_log": _without_log,
}
