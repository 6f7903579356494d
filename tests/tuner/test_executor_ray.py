"""The executor of a Ray cluster keeps the contract, and leaves nothing in the cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest

from cost_model.errors import RuleError
from tests.ray_cluster import CPUS_PER_NODE, agents, cluster, placement_groups
from tests.tuner.executor_contract import ExecutorContract, task
from tuner.executors.base import NoSite, Timers
from tuner.executors.ray import RayExecutor
from tuner.executors.ray_cluster import Node, authenticate, connect
from tuner.executors.supervisor import GangExecutor
from tuner.sweeping.misfit import misfit
from tuner.sweeping.sweep_spec import Target


@pytest.fixture(scope="module")
def ray_executor() -> Iterator[RayExecutor]:
    executor = RayExecutor(cluster().address)
    yield executor
    executor.close()


def emptied(what: Callable[[], list[Any]]) -> bool:
    """Whether the list empties soon: Ray removes in the background."""
    deadline = time.monotonic() + 20
    while what() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not what()


class TestRayExecutor(ExecutorContract):
    @pytest.fixture
    def executor(self, ray_executor: RayExecutor) -> RayExecutor:
        return ray_executor

    @pytest.fixture
    def new(self, ray_executor: RayExecutor) -> Callable[[], RayExecutor]:
        return lambda: RayExecutor(cluster().address)

    def test_ranks_are_contiguous_node_by_node(self, executor: RayExecutor) -> None:
        outcome = executor.run(task("where", ranks=4, nodes=2))
        assert outcome.ok, outcome
        assert [r["local_rank"] for r in outcome.results] == ["0", "1", "0", "1"]
        assert not any(r["ray"] for r in outcome.results)
        (group,) = placement_groups()
        assert group["strategy"] == "STRICT_SPREAD"
        assert len(set(group["bundles_to_node_id"].values())) == 2
        assert executor.run(task("where")).ok
        (group,) = placement_groups()
        assert group["strategy"] == "STRICT_PACK"

    def test_what_no_node_holds_is_refused_with_the_way_out(self, executor: RayExecutor) -> None:
        assert executor.max_ranks("cpu") == 2 * CPUS_PER_NODE
        wide = executor.run(task("where", ranks=CPUS_PER_NODE + 2))
        assert wide.kind == "unplaced"
        assert "spread them over more nodes" in wide.reason
        uneven = executor.run(task("where", ranks=3, nodes=2))
        assert uneven.kind == "unplaced"
        assert "do not divide" in uneven.reason

    def test_a_full_cluster_is_waited_for_and_said(
        self, executor: RayExecutor, new: Callable[[], RayExecutor]
    ) -> None:
        assert executor.run(task("where", ranks=2 * CPUS_PER_NODE, nodes=2)).ok
        other = new()
        outcome = other.run(task("where", timers=Timers(place_s=1.0)))
        assert outcome.kind == "unplaced"
        assert "no room for 2 cpu ranks within 1 s" in outcome.reason
        asked = iter([False])
        waiting = other.run(task("where", timers=Timers(place_s=60.0)), cancelled=lambda: next(asked, True))
        assert waiting.kind == "cancelled"
        other.close()

    def test_a_gang_that_idles_gives_its_room_back(self, ray_executor: RayExecutor) -> None:
        self.check_usable(ray_executor)  # on one node, so that there is room on the other
        warm = len(agents())
        executor = RayExecutor(cluster().address, idle_s=0.2)
        self.check_usable(executor)
        assert emptied(lambda: agents()[warm:])
        assert executor.pids() == []
        executor.close()

    @pytest.mark.parametrize("act", ["kill", "device_oom"])
    def test_a_gang_thrown_away_leaves_its_place_to_the_next(self, executor: RayExecutor, act: str) -> None:
        self.check_usable(executor)
        place = {agent.pid for agent in agents()}
        ranks = [psutil.Process(pid) for pid in executor.pids()]
        assert executor.run(task("misbehave", {"act": act})).kind in ("died", "device_oom")
        _, alive = psutil.wait_procs(ranks, timeout=10)
        assert alive == []
        self.check_usable(executor)
        assert {agent.pid for agent in agents()} == place
        assert not set(executor.pids()) & {rank.pid for rank in ranks}

    def test_one_that_is_closed_after_a_failure_leaves_nothing(self, executor: RayExecutor) -> None:
        assert executor.run(task("misbehave", {"act": "kill"})).kind == "died"
        GangExecutor.close(executor)
        assert emptied(placement_groups)
        assert emptied(agents)

    def test_a_node_whose_only_rank_died_gives_its_place_back_at_once(self, executor: RayExecutor) -> None:
        assert executor.run(task("misbehave", {"act": "kill"}, ranks=2, nodes=2)).kind == "died"
        place = {agent.pid for agent in agents()}
        assert executor.run(task("where", ranks=2, nodes=2)).ok
        assert {agent.pid for agent in agents()} == place

    def test_room_that_a_lost_node_had_is_waited_for(self, executor: RayExecutor) -> None:
        wide = task("where", ranks=2 * CPUS_PER_NODE + 2, nodes=3, timers=Timers(place_s=0.5))
        assert "room for" in (executor.refusal(wide) or "")
        executor._seen["gone"] = Node("gone", CPUS_PER_NODE, 0.0)
        executor._sites["gone", "cpu", True] = executor.site("cpu", 3)
        assert executor.refusal(wide) is None
        assert executor.run(wide).kind == "unplaced"
        del executor._seen["gone"]

    def test_a_gang_stands_on_the_hardware_that_its_task_names(
        self, new: Callable[[], RayExecutor], executor: RayExecutor
    ) -> None:
        GangExecutor.close(executor)  # its place would be missing below
        mixed = new()
        here = mixed.site("cpu")
        large, small = mixed._living()
        mixed._sites[small.id, "cpu", False] = replace(here, hardware_id="other")

        def stands() -> set[str]:
            return {node for group in placement_groups() for node in group["bundles_to_node_id"].values()}

        for node, kind in ((small, "other"), (large, here.hardware_id), (small, "other")):
            assert mixed.run(task("where", hardware_id=kind)).ok
            assert stands() == {node.id}
        assert mixed.run(task("where")).ok  # whatever it is, the warm gang is one of the cluster's
        assert stands() == {small.id}
        # sweeps of either kind run on the one cluster; those of a third are left to others
        for kind in ("other", here.hardware_id):
            assert mixed.site("cpu", 1, kind).hardware_id == kind
            assert misfit(mixed, Target(ranks=2, hardware_id=kind)) is None
        refused = misfit(mixed, Target(ranks=2, hardware_id="third"))
        assert refused is not None
        assert refused.value == "third"
        # the free node is of another kind: the task waits for its own
        other = new()
        other._sites |= mixed._sites
        outcome = other.run(task("where", hardware_id="other", timers=Timers(place_s=1.0)))
        assert outcome.kind == "unplaced"
        assert "on its 1 nodes of other" in outcome.reason
        other.close()
        mixed.close()

    def test_what_a_device_that_nobody_has_runs_on_is_not_made_up(self, executor: RayExecutor) -> None:
        with pytest.raises(NoSite, match="cuda"):
            executor.site("cuda")

    def test_a_killed_actor_ends_its_rank_and_is_a_reason(self, executor: RayExecutor) -> None:
        self.check_usable(executor)
        ranks = [psutil.Process(pid) for pid in executor.pids()]
        for agent in agents():
            agent.kill()
        _, alive = psutil.wait_procs(ranks, timeout=20)
        assert alive == []
        self.check_usable(executor)

        def kill_the_actors(rank: int, progress: dict[str, Any]) -> None:
            for agent in agents():
                agent.kill()

        outcome = executor.run(task("misbehave", {"act": "hang"}), on_progress=kill_the_actors)
        assert outcome.kind == "died"
        assert "its node or its actor is gone" in outcome.reason

    def test_closing_the_last_one_leaves_nothing(self, ray_executor: RayExecutor) -> None:
        ray_executor.close()
        assert emptied(agents)


def test_a_cluster_of_others_needs_a_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    ours: dict[str, str] = {}
    authenticate(ours, local=True)
    assert ours["RAY_AUTH_MODE"] == "token"
    assert len(ours["RAY_AUTH_TOKEN"]) == 64
    with pytest.raises(RuleError, match="with its token"):
        authenticate({}, local=False)
    open_cluster = {"RAY_AUTH_MODE": "disabled"}
    authenticate(open_cluster, local=False)
    assert "RAY_AUTH_TOKEN" not in open_cluster


def test_an_address_where_nobody_listens_is_said_at_once() -> None:
    cluster()
    with pytest.raises(RuleError, match="answer at the address"):
        connect("127.0.0.1:1")


def test_room_on_a_node() -> None:
    node = Node("n", cpus=16.0, gpus=8.0)
    assert (node.room("cuda", 1.0), node.room("cuda", 4.0), node.room("cpu", 4.0)) == (8, 4, 4)
    assert Node("n", 4.0, 0.0).room("cuda", 1.0) == 0
