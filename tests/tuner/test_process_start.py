"""A process is told from every other one by its id and its start, whatever is done to the clock or to its name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tuner.machine.process_start import process_start


def test_a_living_process_has_a_start_and_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = process_start(os.getpid())
    assert before
    # what a process says of its start by the clock moves with the machine's clock
    monkeypatch.setattr(psutil, "boot_time", lambda: 0.0)
    assert process_start(os.getpid()) == before


def test_a_process_that_ended_has_none() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        os.sched_yield()
    assert not process_start(child.pid)
    child.wait()
    assert not process_start(child.pid)


def test_a_name_with_brackets_and_spaces_is_no_trouble(tmp_path: Path) -> None:
    sleep = shutil.which("sleep")
    assert sleep is not None
    odd = tmp_path / "a) Z 1 (b"
    shutil.copy(sleep, odd)
    with subprocess.Popen([odd, "60"]) as child:
        try:
            assert process_start(child.pid).isdigit()
        finally:
            child.kill()
