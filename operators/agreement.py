"""Decisions that all ranks take together, before the step.

A rank that fails alone leaves the others waiting in their next collective. So what can fail on one rank (a host
allocation, a wrong local value) is tried here: every rank learns of every failure, and all of them raise the
same error or none does. Only ``all_reduce`` is used, which every backend carries for CPU and CUDA tensors.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from operators.errors import RuleError
from operators.ranks import Ranks

T = TypeVar("T")
_MESSAGE_BYTES = 512


def agree_min(ranks: Ranks | None, value: int, *, device: torch.device | str = "cpu") -> int:
    """The smallest ``value`` of the group (``value`` itself without a group)."""
    if ranks is None:
        return value
    smallest = torch.tensor([value], dtype=torch.int64, device=device)
    ranks.all_reduce(smallest, "min")
    return int(smallest)


def agree_max(ranks: Ranks | None, value: int, *, device: torch.device | str = "cpu") -> int:
    """The largest ``value`` of the group (``value`` itself without a group)."""
    return -agree_min(ranks, -value, device=device)


def wanted_on_this_host(ranks: Ranks | None, nbytes: int, *, device: torch.device | str = "cpu") -> int:
    """Bytes that all ranks of the group on this host want together, this rank's ``nbytes`` included."""
    if ranks is None:
        return nbytes
    host = _host_number()
    table = torch.zeros(ranks.size, 2, dtype=torch.int64, device=device)
    table[ranks.rank] = torch.tensor([host, nbytes], dtype=torch.int64)
    ranks.all_reduce(table, "max")
    return sum(wanted for number, wanted in table.tolist() if number == host)


def all_or_none(
    ranks: Ranks | None,
    attempt: Callable[[], T],
    *,
    undo: Callable[[T], None],
    what: str,
    device: torch.device | str = "cpu",
) -> T:
    """Run ``attempt`` on every rank; keep its result only if it succeeded on all of them.

    Args:
        ranks: the group; None runs ``attempt`` alone.
        attempt: local work that may raise. It must not enter a collective.
        undo: gives back a local success when another rank failed.
        what: names the attempt in the error ("reserving 8 GiB of host memory").
        device: where the exchanged flags live (a CUDA device for NCCL).

    Raises:
        RuleError: ``attempt`` failed on at least one rank. The text is the same on all ranks: which ranks
            failed, and why the first of them did.
    """
    if ranks is None:
        return attempt()
    result: T | None = None
    failure: Exception | None = None
    try:
        result = attempt()
    except Exception as error:  # whatever it is, the other ranks have to hear of it
        failure = error
    table = torch.zeros(ranks.size, _MESSAGE_BYTES, dtype=torch.int32, device=device)
    if failure is not None:
        text = (str(failure) or type(failure).__name__).encode()[:_MESSAGE_BYTES]
        table[ranks.rank, : len(text)] = torch.tensor(list(text), dtype=torch.int32, device=device)
    ranks.all_reduce(table, "max")
    messages = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in table.tolist()]
    failed = [rank for rank, message in enumerate(messages) if message]
    if not failed:
        return result  # type: ignore[return-value]  # no message: attempt returned
    if failure is None:
        undo(result)  # type: ignore[arg-type]
    raise RuleError(
        rule=f"{what} has to succeed on all ranks; it failed on {failed}: rank {failed[0]} said: "
        f"{messages[failed[0]]}",
        value=failed,
        remedy="Nothing was kept on any rank. Lower what is asked for, or repair the ranks named.",
    ) from failure


def _host_number() -> int:
    """A positive number that ranks share exactly when they run on one host (one kernel)."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        name = Path("/proc/sys/kernel/random/boot_id").read_text()
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big") + 1
