"""Ending long work in an orderly way: the first signal asks, the second one insists."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Stopping:
    """Within it, SIGINT and SIGTERM set a flag; a second one ends the process as usual."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._before: dict[int, Any] = {}

    def asked(self) -> bool:
        """Whether somebody asked to stop."""
        return self.event.is_set()

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.event.set()
        signal.signal(number, self._before.get(number, signal.SIG_DFL))
