"""How a running sweep is shown while it runs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from api.cli.console import err
from api.units import seconds_text

if TYPE_CHECKING:
    from tuner.sweeping.sweep import SweepProgress


def progress_note(now: SweepProgress) -> str:
    """Trials by state, those that wait left out, and the best latency so far."""
    note = " ".join(f"{state} {number}" for state, number in sorted(now.counts.items()) if state != "queued")
    return note if now.best_latency_s is None else f"{note} · best {seconds_text(now.best_latency_s)}"


class Live:
    """A progress bar on stderr; a line a trial where stderr is no terminal; nothing with ``quiet``."""

    def __init__(self, sweep_id: str, *, quiet: bool) -> None:
        self._id, self._quiet = sweep_id, quiet
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=err,
            disable=quiet or not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task(sweep_id, total=None, note="")
        self._ended = -1

    def __enter__(self) -> Live:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, now: SweepProgress) -> None:
        note = progress_note(now)
        self._bar.update(self._task, completed=now.ended, total=now.total, note=note)
        if self._bar.disable and not self._quiet and now.ended != self._ended:
            err.print(f"{self._id} {now.ended}/{now.total} {note}", markup=False)
        self._ended = now.ended
