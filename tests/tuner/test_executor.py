"""The executor of this machine keeps the contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tuner.executor_contract import ExecutorContract, task
from tuner.executors.local import LocalExecutor


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
        assert outcome.kind == "invalid"
        assert "one node" in outcome.reason
