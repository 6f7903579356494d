"""Gangs on a Ray cluster: many machines, the same tasks, outcomes and timers as on one."""

from __future__ import annotations

import threading
from collections import defaultdict
from time import monotonic
from typing import TYPE_CHECKING, Any

from tuner.executors.base import GangOutcome, GangTask, Progress, Site
from tuner.executors.ray_cluster import Node, connect, living_nodes
from tuner.executors.supervisor import Cancelled, Gang, GangExecutor

if TYPE_CHECKING:
    from tuner.executors.ray_gang import RayGang

_NODES_KNOWN_S = 2.0
_DESCRIBE_S = 120.0


class RayExecutor(GangExecutor):
    """Runs one task at a time on a Ray cluster; see :class:`tuner.executors.base.Executor`.

    Nodes of a cluster may differ. A gang stands on nodes of one kind: the kind that has the most room for
    its device, which :meth:`site` describes.

    Args:
        address: ``host:port``, ``auto`` or ``ray://host:port``; None starts a cluster of this machine alone.
        cpus_per_rank: cores that a rank takes, whatever its device; also its OMP_NUM_THREADS.
        idle_s: a gang that has had nothing to do for so long gives its room back to the cluster.

    Raises:
        RuleError: Ray is not installed, there is no token, or no cluster answers at the address.
    """

    def __init__(
        self, address: str | None = None, *, cpus_per_rank: float = 1.0, idle_s: float = 60.0
    ) -> None:
        super().__init__()
        self._ours = connect(address)
        self._cpus_per_rank = cpus_per_rank
        self._idle_s = idle_s
        self._idle: threading.Timer | None = None
        self._sites: dict[tuple[str, str, bool], Site] = {}
        self._nodes: tuple[float, list[Node]] = (float("-inf"), [])

    def max_ranks(self, device: str) -> int:
        return sum(node.room(device, self._cpus_per_rank) for node in self._kind(device))

    def site(self, device: str, nodes: int = 1) -> Site:
        kind = self._kind(device, nodes)
        if not kind:
            from tuner.executors.local import local_site

            return local_site("cpu")
        return self._site(kind[0], device, nodes)

    def run(
        self,
        task: GangTask,
        *,
        on_progress: Progress | None = None,
        cancelled: Cancelled | None = None,
    ) -> GangOutcome:
        from ray.exceptions import RayError

        self._stay()
        try:
            return super().run(task, on_progress=on_progress, cancelled=cancelled)
        except RayError as error:
            return GangOutcome("died", reason=f"the cluster is gone: {error}")
        finally:
            if self._gang is not None:
                self._idle = threading.Timer(self._idle_s, super().close)
                self._idle.daemon = True
                self._idle.start()

    def close(self) -> None:
        import ray

        self._stay()
        super().close()
        if self._ours:
            ray.shutdown()
            self._ours = False

    def pids(self) -> list[int]:
        """Processes of the warm gang's ranks, on whatever node they are."""
        gang: RayGang | None = self._gang  # type: ignore[assignment]
        return (
            []
            if gang is None
            else [pid for home in gang.homes() if home is not None for pid in home.rank_pids]
        )

    def refusal(self, task: GangTask) -> str | None:
        if task.ranks % task.nodes:
            return f"{task.ranks} ranks do not divide over {task.nodes} nodes"
        rooms = [node.room(task.device, self._cpus_per_rank) for node in self._kind(task.device, task.nodes)]
        if task.ranks > sum(rooms):
            return f"the cluster has room for {sum(rooms)} {task.device} ranks, not for {task.ranks}"
        per_node = task.ranks // task.nodes
        wide = sum(room >= per_node for room in rooms)
        if wide < task.nodes:
            return (
                f"{wide} nodes of the cluster have room for {per_node} {task.device} ranks, not {task.nodes}: "
                f"spread them over more nodes (target: nodes), at most {max(rooms)} on each"
            )
        return None

    def make(self, task: GangTask, cancelled: Cancelled) -> Gang:
        from tuner.executors.ray_gang import Demand, RayGang

        kind = self._kind(task.device, task.nodes)
        several = len(kind) < len(self._living())
        demand = Demand(
            ranks=task.ranks,
            nodes=task.nodes,
            device=task.device,
            cpus_per_rank=self._cpus_per_rank,
            node_ids=tuple(node.id for node in kind) if several else (),
        )
        return RayGang(demand, task, cancelled)

    def _stay(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    # -- nodes -----------------------------------------------------------------------------------------

    def _living(self) -> list[Node]:
        known, nodes = self._nodes
        if monotonic() - known > _NODES_KNOWN_S:
            nodes = living_nodes()
            self._nodes = (monotonic(), nodes)
        return nodes

    def _kind(self, device: str, nodes: int = 1) -> list[Node]:
        """Nodes of the kind that has the most room for this device; over several, also of one network."""
        rooms = {node: node.room(device, self._cpus_per_rank) for node in self._living()}
        able = [node for node, room in rooms.items() if room > 0]
        if len(able) < 2:
            return able
        kinds: dict[str, list[Node]] = defaultdict(list)
        for node in able:
            kinds[self._site(node, device, nodes).hardware_id].append(node)
        return max(kinds.values(), key=lambda nodes: (sum(rooms[n] for n in nodes), nodes[0].id))

    def _site(self, node: Node, device: str, nodes: int) -> Site:
        key = (node.id, device, nodes > 1)
        if key not in self._sites:
            self._sites[key] = _describe(node, device, several=nodes > 1)
        return self._sites[key]


def _describe(node: Node, device: str, *, several: bool) -> Site:
    """Ask a node what it is; it needs no free core to say so."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from tuner.executors.ray_agent import describe

    there = NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "max_retries": 2, "scheduling_strategy": there}
    ref = ray.remote(describe).options(**options).remote(device, several)
    site: Site = ray.get(ref, timeout=_DESCRIBE_S)
    return site
