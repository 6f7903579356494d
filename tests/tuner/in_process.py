"""An executor for tests of what surrounds it: one rank, in the worker's own process, in no time."""

from __future__ import annotations

from collections.abc import Callable

from operators.ranks import LoopbackRanks
from tuner.executors.base import GangOutcome, GangTask, Progress, Site
from tuner.executors.local import local_site
from tuner.executors.rank_process import load


class InProcessExecutor:
    """See :class:`tuner.executors.base.Executor`.

    Args:
        after: called with the number of tasks done so far, before each.
    """

    def __init__(self, after: Callable[[int], None]) -> None:
        self._after, self._done = after, 0

    def run(
        self,
        task: GangTask,
        *,
        on_progress: Progress | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> GangOutcome:
        self._after(self._done)
        result = load(task.function)(LoopbackRanks(1), task.payload, lambda progress: None)
        self._done += 1
        return GangOutcome("done", results=[result])

    def max_ranks(self, device: str) -> int:
        return 1 if device == "cpu" else 0

    def refusal(self, task: GangTask) -> str | None:
        return None if task.ranks <= self.max_ranks(task.device) else "one rank on the CPU is all there is"

    def site(self, device: str, nodes: int = 1, hardware_id: str | None = None) -> Site:
        return local_site(device)

    def close(self) -> None:
        return
