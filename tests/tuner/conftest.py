"""A database, an executor and sweeps of the toy operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from db.session import Database
from tests.tuner import toy
from tuner.executors.local import LocalExecutor
from tuner.sweeping.sweep import SweepSpec, parse_sweep

ToySpec = Callable[..., SweepSpec]


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path / 'flatpeak.db'}")
    database.migrate()
    yield database
    database.close()


@pytest.fixture(scope="session")
def executor() -> Iterator[LocalExecutor]:
    executor = LocalExecutor()
    yield executor
    executor.close()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where the toy writes a line a launch."""
    path = tmp_path / "launches"
    path.touch()
    return path


@pytest.fixture
def toy_spec(log: Path) -> ToySpec:
    """Specs of two-rank toy sweeps; keywords replace keys of the file."""

    def make(n: list[int], act: list[str], *, pause_ms: int = 1, **more: Any) -> SweepSpec:
        data: dict[str, Any] = {
            "operator": toy.NAME,
            "target": {"ranks": 2},
            "shape": {"log": str(log), "pause_ms": pause_ms},
            "space": {"n": n, "act": act},
            "timers": {"stall_s": 60, "cancel_s": 1},
        }
        return parse_sweep(data | more)

    return make
