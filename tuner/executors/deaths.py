"""Why a rank's process ended, as far as its machine can tell; called on the machine it ran on."""

from __future__ import annotations

import signal
from pathlib import Path

from tuner.executors.base import OutcomeKind

# Of this control group where it has its own counter (version 2), else of the whole machine.
COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))


def why_died(exit_code: int | None, kills_before: int | None) -> tuple[OutcomeKind, str]:
    """The kind and the reason, from the exit code (negative: a signal).

    Args:
        kills_before: :func:`kernel_oom_kills` when the task began.
    """
    if exit_code is None or exit_code >= 0:
        return "died", f"its process ended with exit code {exit_code}"
    kills = kernel_oom_kills()
    if -exit_code == signal.SIGKILL and None not in (kills, kills_before) and kills != kills_before:
        return "host_oom", "the kernel killed it for lack of host memory"
    return "died", f"its process was killed by {_signal_name(-exit_code)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals
        return f"signal {number}"


def kernel_oom_kills() -> int | None:
    """How many processes the kernel has killed for lack of memory: in this control group, else anywhere."""
    for path in COUNTERS:
        try:
            lines = path.read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None
