"""Cores that this process may use: its affinity, and the time that its control groups grant it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

_ROOT = Path("/")


def usable_cores(root: Path = _ROOT) -> int:
    """Cores of the calling thread's affinity, or fewer where a CPU quota of its control groups grants less.

    A quota of two and a half cores counts as three. What cannot be read limits nothing.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else psutil.cpu_count(logical=True) or 1
    return max(1, min([cores, *(math.ceil(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Quotas in cores of the process's groups and of those above them, cgroup v2 and v1."""
    for folder in _groups(root):
        words = _words(folder / "cpu.max") or [
            *_words(folder / "cpu.cfs_quota_us"),
            *_words(folder / "cpu.cfs_period_us"),
        ]
        if (
            len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]) > 0
        ):  # "max", "-1": none
            yield int(words[0]) / int(words[1])


def _groups(root: Path) -> Iterator[Path]:
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / controllers if controllers else root / "sys/fs/cgroup"
        group = Path(path.lstrip("/"))
        # in a container the path may be the host's, which is not mounted: its own group is then the mount itself
        yield from (mount / part for part in (group, *group.parents))


def _words(path: Path) -> list[str]:
    return _text(path).split()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
