"""The folder of a gang: held while its owner lives, removed by whoever notices that it does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tuner.executors.folder import GangFolder, abandoned

_OWNER = """
import os, signal, sys
from tuner.executors.folder import GangFolder
folder = GangFolder()
folder.log(0).write_text("said")
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
folder.remove()
"""


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def own(scratch: Path, end: str) -> int:
    environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONPATH": os.pathsep.join([".", *sys.path])}
    return subprocess.run([sys.executable, "-c", _OWNER, end], env=environment, check=False).returncode


def age(path: Path) -> None:
    os.utime(path, (0, 0))


def test_one_that_is_held_is_nobody_elses(scratch: Path) -> None:
    folder = GangFolder()
    age(folder.path)
    assert abandoned() == []
    assert own(scratch, "leaves") == 0
    assert list(scratch.iterdir()) == [folder.path]
    folder.remove()
    assert list(scratch.iterdir()) == []
    folder.remove()


def test_what_a_killed_owner_left_is_removed_by_the_next(scratch: Path) -> None:
    assert own(scratch, "killed") == -signal.SIGKILL
    (left,) = scratch.iterdir()
    assert abandoned() == [], "it could be one that is just being made"
    age(left)
    assert abandoned() == [left]
    assert own(scratch, "leaves") == 0
    assert list(scratch.iterdir()) == []
