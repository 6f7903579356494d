"""One rank of a gang: joins its group, then runs one task after another until its supervisor goes.

Talks to the supervisor over one pipe: ``("store", host, port)`` from rank 0 of a gang that meets over TCP, then
``("ready",)``, ``("progress", JSON)``, ``("done", JSON)`` or ``("error", kind, text)``.
"""

from __future__ import annotations

import errno
import gc
import importlib
import os
import resource
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from operators.errors import RuleError
from operators.ranks import ProcessRanks
from tuner.executors.place import Place

# Collectives must outlast the stall timer, which is the one that ends a hung gang and says why.
_COLLECTIVE_TIMEOUT = timedelta(hours=2)


def serve(place: Place, pipe: Connection, lifeline: Connection) -> None:
    """Body of the process."""
    end = threading.Thread(target=_end_with, args=(lifeline, place.log), daemon=True)
    end.start()
    if place.log is not None:
        _redirect(place.log)
    os.environ |= {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "OMP_NUM_THREADS": str(place.threads),
    }
    torch.set_num_threads(place.threads)
    try:
        ranks = _join(place, pipe)
    except Exception:
        pipe.send(("error", "start", traceback.format_exc()))
        return
    gc.collect()
    gc.freeze()  # what is loaded now stays: collecting after each trial need not look through it again
    pipe.send(("ready",))
    while True:
        try:
            function, payload, host_limit_bytes = pipe.recv()
        except EOFError:
            break
        _answer(pipe, _run(ranks, pipe, function, payload, host_limit_bytes))
    dist.destroy_process_group()
    end.join()


def load(reference: str) -> Any:
    """The object that ``module:name`` stands for."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def _run(
    ranks: ProcessRanks,
    pipe: Connection,
    function: str,
    payload: dict[str, Any],
    host_limit_bytes: int | None,
) -> tuple[Any, ...]:
    def report(progress: dict[str, Any]) -> None:
        pipe.send(("progress", progress))

    try:
        torch.manual_seed(0)
        call: Callable[..., Any] = load(function)
        with _limited(host_limit_bytes):
            return ("done", call(ranks, payload, report))
    except BaseException as error:  # whatever a rank does, its supervisor hears of it
        kind = _kind(error)
        text = _said(error) if kind in ("device_oom", "host_oom", "invalid") else traceback.format_exc()
        with suppress(Exception):  # the task may have closed the log
            traceback.print_exc()
        return ("error", kind, text)


def _answer(pipe: Connection, message: tuple[Any, ...]) -> None:
    try:
        pipe.send(message)
    except OSError:
        raise
    except Exception as error:  # a result that cannot be sent
        pipe.send(("error", "raised", f"its result cannot be sent: {_text(error)}"))


def _text(error: BaseException) -> str:
    try:
        return str(error).strip()
    except Exception:  # an exception of the task's own
        return ""


def _kind(error: BaseException) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "device_oom"
    text = _text(error)
    # torch's CPU allocator raises a plain RuntimeError; only its text tells
    no_memory = isinstance(error, RuntimeError) and ("can't allocate memory" in text or "bad_alloc" in text)
    if isinstance(error, MemoryError) or no_memory:
        return "host_oom"
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return "host_oom"
    if isinstance(error, RuleError):
        return "invalid"
    return "raised"


def _said(error: BaseException) -> str:
    text = _text(error)
    return text.splitlines()[0] if text else type(error).__name__


@contextmanager
def _limited(host_limit_bytes: int | None) -> Iterator[None]:
    """Let the data memory of this process grow by so much and no more, where the system can count it."""
    held = _data_bytes()
    if host_limit_bytes is None or held is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = held + host_limit_bytes
    resource.setrlimit(
        resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_bytes() -> int | None:
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return None


def _join(place: Place, pipe: Connection) -> ProcessRanks:
    options: dict[str, Any] = {}
    if place.device == "cuda":
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
        options["device_id"] = device
    if place.store is not None:
        options["init_method"] = f"file://{place.store}"
    else:
        options["store"] = _meet(place, pipe)
    dist.init_process_group(
        "nccl" if place.device == "cuda" else "gloo",
        rank=place.rank,
        world_size=place.world_size,
        timeout=_COLLECTIVE_TIMEOUT,
        **options,
    )
    ranks = ProcessRanks()
    ranks.barrier()  # connections are made here, not in somebody's first measurement
    return ranks


def _meet(place: Place, pipe: Connection) -> TCPStore:
    """The gang's store: rank 0 opens it on a free port of its node and says where; the others are told."""
    host, port = place.address or "127.0.0.1", 0
    if place.rank > 0:
        _, host, port = pipe.recv()
    store = TCPStore(
        host, port, place.world_size, place.rank == 0, _COLLECTIVE_TIMEOUT, wait_for_workers=False
    )
    if place.rank == 0:
        pipe.send(("store", host, store.port))
    return store


def _redirect(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _end_with(lifeline: Connection, log: str | None) -> None:
    """Leave when the supervisor does, also in the middle of a collective, and take the gang's folder along."""
    try:
        lifeline.recv()
    except (EOFError, OSError):
        if log is not None:
            shutil.rmtree(Path(log).parent, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)  # this process, which leads its group, and its children
