"""Gangs on a Ray cluster: many machines, the same tasks, outcomes and timers as on one."""

from __future__ import annotations

import threading
from collections import defaultdict
from time import monotonic
from typing import TYPE_CHECKING, Any

from tuner.executors.base import GangOutcome, GangTask, NoSite, Progress, Site
from tuner.executors.ray_cluster import Node, connect, living_nodes
from tuner.executors.supervisor import Cancelled, Gang, GangExecutor, Unplaced

if TYPE_CHECKING:
    from tuner.executors.ray_gang import RayGang

_NODES_KNOWN_S = 2.0
_DESCRIBE_S = 120.0


class RayExecutor(GangExecutor):
    """Runs one task at a time on a Ray cluster; see :class:`tuner.executors.base.Executor`.

    Nodes of a cluster may differ. A gang stands on nodes of one kind: the one that its task names, else the kind
    that has the most room for its device, which :meth:`site` describes.

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
        self._seen: dict[str, Node] = {}
        self._kept: RayGang | None = None

    def max_ranks(self, device: str) -> int:
        return sum(node.room(device, self._cpus_per_rank) for node in self._kind(device))

    def site(self, device: str, nodes: int = 1, hardware_id: str | None = None) -> Site:
        """Of the living nodes; where none has the device, of those that had it: a gang waits for such a one."""
        for wanted in dict.fromkeys((hardware_id, None)):
            for among in (self._living(), list(self._seen.values())):
                if kind := self._kind(device, nodes, wanted, among=among):
                    return self._sites_of(kind[:1], device, nodes)[kind[0]]
        raise NoSite(f"no node of the cluster has room for a {device} rank")

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
            if self._gang is not None or self._kept is not None:
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
        """What fits no node that was ever there; for what fits those that are gone now, one waits."""
        if task.ranks % task.nodes:
            return f"{task.ranks} ranks do not divide over {task.nodes} nodes"
        self._living()
        kind = self._kind(task.device, task.nodes, task.hardware_id, among=list(self._seen.values()))
        if task.hardware_id is not None and not kind:
            return None  # such a node was there, or may come
        rooms = [node.room(task.device, self._cpus_per_rank) for node in kind]
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

        try:
            hardware_id = task.hardware_id or self.site(task.device, task.nodes).hardware_id
        except NoSite as error:
            raise Unplaced(GangOutcome("unplaced", reason=str(error))) from None
        demand = Demand(
            ranks=task.ranks,
            nodes=task.nodes,
            device=task.device,
            cpus_per_rank=self._cpus_per_rank,
            hardware_id=hardware_id,
        )

        def among() -> tuple[str, ...]:
            return tuple(node.id for node in self._kind(task.device, task.nodes, hardware_id))

        kept, self._kept = self._kept, None
        if kept is not None and kept.demand == demand:
            kept.begin()
            return kept
        if kept is not None:
            kept.give_back()
        return RayGang(demand, task, among, cancelled)

    def retire(self, gang: Gang, grace_s: float) -> None:
        """End the ranks; their place on the nodes stays for the next gang, as a warm gang would."""
        assert isinstance(gang, _ray_gang())
        if gang.stop(grace_s):
            self._kept = gang
        else:
            gang.give_back()

    def release(self) -> None:
        """Leave the nodes."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.give_back()

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
            self._seen |= {node.id: node for node in nodes}
        return nodes

    def _kind(
        self,
        device: str,
        nodes: int = 1,
        hardware_id: str | None = None,
        *,
        among: list[Node] | None = None,
    ) -> list[Node]:
        """Nodes of this hardware, or of the kind that has the most room for the device; over several, also of
        one network."""
        candidates = self._living() if among is None else among
        rooms = {node: node.room(device, self._cpus_per_rank) for node in candidates}
        able = [node for node, room in rooms.items() if room > 0]
        kinds: dict[str, list[Node]] = defaultdict(list)
        for node, site in self._sites_of(able, device, nodes).items():
            kinds[site.hardware_id].append(node)
        if hardware_id is not None:
            return kinds.get(hardware_id, [])
        return max(kinds.values(), key=lambda nodes: (sum(rooms[n] for n in nodes), nodes[0].id), default=[])

    def _sites_of(self, nodes: list[Node], device: str, spread: int) -> dict[Node, Site]:
        """What these nodes are, as one of ``spread``; one that is gone before it has said so is left out."""
        unknown = [node for node in nodes if (node.id, device, spread > 1) not in self._sites]
        living = {node.id for node in self._living()}
        asked = [node for node in unknown if node.id in living]
        for node, site in _describe(asked, device, several=spread > 1).items():
            self._sites[node.id, device, spread > 1] = site
        known = {node: self._sites.get((node.id, device, spread > 1)) for node in nodes}
        return {node: site for node, site in known.items() if site is not None}


def _describe(nodes: list[Node], device: str, *, several: bool) -> dict[Node, Site]:
    """Ask nodes, all at once, what they are; they need no free core to say so."""
    import ray
    from ray.exceptions import RayError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from tuner.executors.ray_agent import describe

    refs = {}
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
        options: dict[str, Any] = {"num_cpus": 0, "max_retries": 2, "scheduling_strategy": there}
        refs[node] = ray.remote(describe).options(**options).remote(device, several)
    until = monotonic() + _DESCRIBE_S
    found: dict[Node, Site] = {}
    for node, ref in refs.items():
        try:
            found[node] = ray.get(ref, timeout=max(0.0, until - monotonic()))
        except RayTaskError:
            raise  # it has answered, and refuses: a setting of that node is wrong
        except RayError:
            continue
    return found


def _ray_gang() -> type[RayGang]:
    """Ray is loaded on first use."""
    from tuner.executors.ray_gang import RayGang

    return RayGang
