"""What every executor promises: an outcome in any case, a reason, no process left, and the next task runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import psutil
import pytest

from tuner.executors.base import Executor, GangTask, Timers
from tuner.machine.fingerprint import local_hardware_id

_TIMERS = Timers(start_s=120.0, run_s=120.0, stall_s=60.0, cancel_s=2.0)


def task(
    function: str, payload: dict[str, Any] | None = None, *, timers: Timers = _TIMERS, **more: Any
) -> GangTask:
    options: dict[str, Any] = {"ranks": 2, "timers": timers, **more}
    return GangTask(f"tests.tuner.rank_tasks:{function}", payload or {}, **options)


class WatchedExecutor(Executor, Protocol):
    """An executor that says which processes its ranks are."""

    def pids(self) -> list[int]: ...


class ExecutorContract:
    """A subclass gives the fixture ``executor``, which stays for all tests, and ``new``, which makes another."""

    def check_usable(self, executor: WatchedExecutor) -> None:
        outcome = executor.run(task("add", {"value": 1}))
        assert outcome.kind == "done", outcome
        assert [r["total"] for r in outcome.results] == [3.0, 3.0]

    def test_ranks_work_together_stay_warm_and_report(self, executor: WatchedExecutor) -> None:
        heard: list[tuple[int, dict[str, Any]]] = []
        first = executor.run(task("add", {"value": 1}), on_progress=lambda rank, p: heard.append((rank, p)))
        second = executor.run(task("add", {"value": 2}))
        assert first.ok
        assert [r["total"] for r in second.results] == [5.0, 5.0]
        assert [r["pid"] for r in first.results] == [r["pid"] for r in second.results]
        assert sorted(heard) == [(0, {"phase": "adding"}), (1, {"phase": "adding"})]
        environments = [r["env"] for r in first.results]
        assert [e["RANK"] for e in environments] == ["0", "1"]
        assert {e["WORLD_SIZE"] for e in environments} == {"2"}
        assert all(int(e["OMP_NUM_THREADS"]) >= 1 for e in environments)
        assert "rank 1 has added" in first.log_tail
        assert second.log_tail.count("rank 1 has added") == 1

    @pytest.mark.parametrize(
        ("act", "kind", "said"),
        [
            ("raise", "raised", "rank 1 is ill"),
            ("kill", "died", "SIGKILL"),
            ("exit", "died", "exit code 3"),
            ("memory_error", "host_oom", "MemoryError"),
            ("device_oom", "device_oom", "Tried to allocate 2.00 GiB"),
            ("realtime_signal", "died", "signal 40"),
            ("garbage", "raised", "no message"),
            ("unspeakable", "raised", "UnspeakableError"),
            ("without_log", "raised", "rank 1 is ill"),
        ],
    )
    def test_one_bad_rank_ends_the_gang_with_its_reason(
        self, executor: WatchedExecutor, act: str, kind: str, said: str
    ) -> None:
        outcome = executor.run(task("misbehave", {"act": act}))
        assert (outcome.kind, outcome.rank) == (kind, 1), outcome
        assert said in outcome.reason
        assert "More text" not in outcome.reason
        assert "rank 1 is about to misbehave" in outcome.log_tail
        self.check_usable(executor)

    def test_a_hung_rank_is_ended_by_the_stall_timer(self, executor: WatchedExecutor) -> None:
        self.check_usable(executor)
        timers = Timers(start_s=120.0, run_s=120.0, stall_s=2.0, cancel_s=1.0)
        outcome = executor.run(task("misbehave", {"act": "hang"}, timers=timers))
        assert outcome.kind == "stalled"
        assert "no progress for 2 s" in outcome.reason
        self.check_usable(executor)

    def test_a_rank_that_stops_in_the_middle_of_a_word_is_ended_too(self, executor: WatchedExecutor) -> None:
        self.check_usable(executor)
        timers = Timers(start_s=120.0, run_s=120.0, stall_s=2.0, cancel_s=1.0)
        outcome = executor.run(task("misbehave", {"act": "half"}, timers=timers))
        assert outcome.kind == "stalled"
        self.check_usable(executor)

    @pytest.mark.parametrize(("act", "said"), [("unreadable", "no number"), ("unsendable", "cannot be sent")])
    def test_an_answer_that_cannot_be_read_is_a_reason(
        self, executor: WatchedExecutor, act: str, said: str
    ) -> None:
        outcome = executor.run(task("answer", {"act": act}))
        assert outcome.kind == "raised", outcome
        assert said in outcome.reason
        self.check_usable(executor)

    @pytest.mark.parametrize(("act", "kind"), [("raise", "raised"), ("exit", "died"), ("hang", "cancelled")])
    def test_children_of_a_rank_hide_nothing_and_end_with_it(
        self, executor: WatchedExecutor, act: str, kind: str
    ) -> None:
        children: list[psutil.Process] = []

        def hear(rank: int, progress: dict[str, Any]) -> None:
            children.extend(psutil.Process(pid) for pid in progress["children"])

        outcome = executor.run(
            task("leave_children", {"act": act}),
            on_progress=hear,
            cancelled=lambda: act == "hang" and bool(children),
        )
        assert outcome.kind == kind, outcome
        assert len(children) == 2
        _, alive = psutil.wait_procs(children, timeout=10)
        assert alive == []

    def test_progress_does_not_buy_more_than_the_whole_allowance(self, executor: WatchedExecutor) -> None:
        self.check_usable(executor)
        timers = Timers(start_s=120.0, run_s=1.0, stall_s=60.0, cancel_s=1.0)
        assert executor.run(task("keep_reporting", timers=timers)).kind == "timeout"

    def test_a_task_is_cancelled_while_it_runs(self, executor: WatchedExecutor) -> None:
        asked = iter([False, False])
        outcome = executor.run(task("misbehave", {"act": "hang"}), cancelled=lambda: next(asked, True))
        assert outcome.kind == "cancelled"
        self.check_usable(executor)

    def test_a_refused_configuration_keeps_the_gang(self, executor: WatchedExecutor) -> None:
        before = executor.run(task("add", {"value": 1}))
        outcome = executor.run(task("refuse", {"a": 1}))
        after = executor.run(task("add", {"value": 1}))
        assert outcome.kind == "invalid"
        assert "nothing is right" in outcome.reason
        assert [r["pid"] for r in before.results] == [r["pid"] for r in after.results]

    def test_a_refusal_of_one_rank_ends_the_gang_that_waits_for_it(self, executor: WatchedExecutor) -> None:
        outcome = executor.run(task("refuse_alone"))
        assert (outcome.kind, outcome.rank) == ("invalid", 1)
        self.check_usable(executor)

    def test_where_all_have_lost_a_peer_nothing_is_known_of_the_task(self, executor: WatchedExecutor) -> None:
        outcome = executor.run(task("lose_peers"))
        assert outcome.kind == "died"
        assert "Connection closed by peer" in outcome.reason

    def test_a_supervisor_that_was_held_up_calls_nobody_stalled(self, executor: WatchedExecutor) -> None:
        self.check_usable(executor)
        timers = Timers(start_s=120.0, run_s=120.0, stall_s=2.0, cancel_s=1.0)
        outcome = executor.run(
            task("add", {"value": 1}, timers=timers), on_progress=lambda rank, progress: time.sleep(2.5)
        )
        assert outcome.ok, outcome

    def test_a_gang_that_comes_up_is_kept_for_the_next_task(self, new: Callable[[], WatchedExecutor]) -> None:
        executor = new()
        assert executor.run(task("add", {"value": 1}), cancelled=lambda: True).kind == "cancelled"
        before = executor.pids()
        self.check_usable(executor)
        assert len(before) == 2
        assert executor.pids() == before
        executor.close()

    def test_host_memory_is_limited_and_its_lack_is_a_result(self, executor: WatchedExecutor) -> None:
        wanted = {"bytes": 2**30}
        outcome = executor.run(task("allocate", wanted, host_limit_bytes=256 * 2**20))
        assert outcome.kind == "host_oom", outcome
        assert executor.run(task("allocate", {"bytes": 2**26}, host_limit_bytes=2**30)).kind == "done"

    def test_a_task_bound_to_hardware_never_runs_on_another(self, executor: WatchedExecutor) -> None:
        here = executor.site("cpu").hardware_id
        first = executor.run(task("add", {"value": 1}, hardware_id=here))
        second = executor.run(task("add", {"value": 1}, hardware_id=here))
        assert first.ok
        assert [r["pid"] for r in first.results] == [r["pid"] for r in second.results]
        timers = Timers(place_s=0.2)
        outcome = executor.run(task("add", {"value": 1}, hardware_id="elsewhere", timers=timers))
        assert outcome.kind == "unplaced"
        assert "elsewhere" in outcome.reason
        self.check_usable(executor)

    def test_more_ranks_than_there_is_room_for_are_refused(self, executor: WatchedExecutor) -> None:
        outcome = executor.run(GangTask("tests.tuner.rank_tasks:add", {"value": 1}, ranks=2, device="cuda"))
        assert outcome.kind == "unplaced"
        assert "0 cuda ranks" in outcome.reason

    def test_a_rank_that_dies_between_tasks_is_noticed(self, executor: WatchedExecutor) -> None:
        self.check_usable(executor)
        victim = psutil.Process(executor.pids()[0])
        victim.kill()
        psutil.wait_procs([victim], timeout=10)
        self.check_usable(executor)

    def test_ranks_that_do_not_come_up_are_said_so(self, new: Callable[[], WatchedExecutor]) -> None:
        executor = new()
        outcome = executor.run(task("add", {"value": 1}, timers=Timers(start_s=0.0, cancel_s=0.0)))
        assert outcome.kind == "start"
        assert "did not join within 0 s" in outcome.reason
        assert executor.pids() == []
        executor.close()

    def test_closing_leaves_no_process(self, new: Callable[[], WatchedExecutor]) -> None:
        executor = new()
        self.check_usable(executor)
        ranks = [psutil.Process(pid) for pid in executor.pids()]
        assert len(ranks) == 2
        executor.close()
        _, alive = psutil.wait_procs(ranks, timeout=10)
        assert alive == []

    def test_the_site_names_the_hardware_and_its_memory(self, executor: WatchedExecutor) -> None:
        site = executor.site("cpu")
        assert site.hardware_id == local_hardware_id("cpu")
        assert site.software["torch"]
        assert site.rank_bytes("cpu", 2) == int(psutil.virtual_memory().total * 0.95) // 2
