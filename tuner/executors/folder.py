"""A gang's folder: held by a lock while its owner lives, so that whoever comes next knows what was left behind."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from functools import cache
from pathlib import Path

_PREFIX = "flatpeak-ranks-"
# A folder this young may not be locked yet.
_YOUNG_S = 30.0


class GangFolder:
    """Logs of a gang's ranks and the file that they meet at; removed by :meth:`remove`.

    An owner that is killed cannot remove it: then its ranks do when they notice, and if they are gone too,
    the next owner on this machine. The kernel gives the lock back however the owner ends.
    """

    def __init__(self) -> None:
        _remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        try:
            self._held = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            self.path.rmdir()
            raise
        fcntl.flock(self._held, fcntl.LOCK_EX)

    def log(self, rank: int) -> Path:
        """What a rank prints."""
        return self.path / f"rank{rank}.log"

    @property
    def store(self) -> Path:
        """What the ranks of one machine meet at."""
        return self.path / "store"

    def remove(self) -> None:
        """Remove it, once."""
        if self._held >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._held)
            self._held = -1


def abandoned() -> list[Path]:
    """Folders whose owner is gone."""
    found = []
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:  # removed meanwhile, or another user's
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(descriptor).st_mtime > _YOUNG_S:
                found.append(path)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)
    return found


@cache
def _remove_abandoned() -> None:
    for path in abandoned():
        shutil.rmtree(path, ignore_errors=True)
