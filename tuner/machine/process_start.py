"""When a process of this machine started: with its id, what no other process is ever called."""

from __future__ import annotations

from pathlib import Path

import psutil


def process_start(pid: int) -> str:
    """The start of a living process, in a form to compare; empty for one that has ended.

    Ticks since the machine's start where the system tells them: a clock that is set moves every other form of it,
    and a living process would look like another one.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "" if Path("/proc/self/stat").exists() else _by_the_clock(pid)
    state, *fields = stat.rpartition(")")[2].split()  # its name, before the bracket, may hold anything
    return "" if state == "Z" else fields[18]


def _by_the_clock(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return "" if process.status() == psutil.STATUS_ZOMBIE else str(round(process.create_time() * 100))
    except psutil.Error:
        return ""
