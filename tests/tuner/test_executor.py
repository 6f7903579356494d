"""The executor of this machine keeps the contract."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tuner.executor_contract import ExecutorContract, task
from tuner.executors import deaths
from tuner.executors.local import LocalExecutor

_SUPERVISOR = """
from tests.tuner.executor_contract import task
from tuner.executors.local import LocalExecutor

LocalExecutor().run(
    task("leave_children", {"act": "hang"}),
    on_progress=lambda rank, progress: print(*progress["children"], flush=True),
)
"""


@pytest.fixture(scope="module")
def local() -> Iterator[LocalExecutor]:
    executor = LocalExecutor()
    yield executor
    executor.close()


class TestLocalExecutor(ExecutorContract):
    @pytest.fixture
    def executor(self, local: LocalExecutor) -> LocalExecutor:
        return local

    @pytest.fixture
    def new(self) -> type[LocalExecutor]:
        return LocalExecutor

    def test_several_nodes_are_refused(self, executor: LocalExecutor) -> None:
        outcome = executor.run(task("add", {"value": 1}, nodes=2))
        assert outcome.kind == "unplaced"
        assert "one node" in outcome.reason

    def test_ranks_that_cannot_be_started_are_said_so(
        self, executor: LocalExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.check_usable(executor)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        children = psutil.Process().children(recursive=True)
        other = LocalExecutor()
        for spare in (0, 1, 2, 14):
            resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + spare, hard))
            try:
                outcome = other.run(task("add", {"value": 1}, ranks=16))
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert outcome.kind == "start", outcome
            assert "could not be started" in outcome.reason
            assert list(tmp_path.iterdir()) == []
            _, alive = psutil.wait_procs(
                set(psutil.Process().children(recursive=True)) - set(children), timeout=10
            )
            assert alive == []
        other.close()
        monkeypatch.undo()
        self.check_usable(executor)

    def test_children_of_ranks_do_not_outlive_a_supervisor_that_is_killed(self) -> None:
        with subprocess.Popen(
            [sys.executable, "-c", _SUPERVISOR], stdout=subprocess.PIPE, text=True
        ) as supervisor:
            assert supervisor.stdout is not None
            children = [psutil.Process(int(pid)) for pid in supervisor.stdout.readline().split()]
            supervisor.kill()
        assert len(children) == 2
        _, alive = psutil.wait_procs(children, timeout=20)
        assert alive == []

    def test_a_rank_that_the_kernel_killed_for_memory_is_a_result(
        self, executor: LocalExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        counter = tmp_path / "memory.events"
        counter.write_text("low 0\noom 4\noom_kill 3\n")
        monkeypatch.setattr(deaths, "COUNTERS", (tmp_path / "absent", counter))

        def count(rank: int, progress: dict[str, Any]) -> None:
            counter.write_text("low 0\noom 5\noom_kill 4\n")

        outcome = executor.run(task("misbehave_later", {"act": "kill"}), on_progress=count)
        assert (outcome.kind, outcome.rank) == ("host_oom", 1), outcome
        assert "for lack of host memory" in outcome.reason
        outcome = executor.run(task("misbehave", {"act": "kill"}))
        assert outcome.kind == "died"


def test_the_kernels_count_is_read_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "memory.events", tmp_path / "vmstat"
    monkeypatch.setattr(deaths, "COUNTERS", (first, second))
    assert deaths.kernel_oom_kills() is None
    assert deaths.why_died(-9, None)[0] == "died"
    second.write_text("nr_free_pages 7\noom_kill 2\n")
    assert deaths.kernel_oom_kills() == 2
    first.write_text("oom_kill 11\noom_group_kill 0\n")
    assert deaths.kernel_oom_kills() == 11
    assert deaths.why_died(-9, 10) == ("host_oom", "the kernel killed it for lack of host memory")
    assert deaths.why_died(-9, 11)[0] == "died"
    assert deaths.why_died(-15, 10) == ("died", "its process was killed by SIGTERM")
    assert deaths.why_died(3, 10) == ("died", "its process ended with exit code 3")
