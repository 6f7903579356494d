"""A gang on a Ray cluster: a placement group with one bundle and one actor a node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tuner.executors.base import GangOutcome, GangTask
from tuner.executors.place import Place
from tuner.executors.ray_agent import Home, NodeAgent
from tuner.executors.supervisor import Message, Unplaced

# An agent answers when a rank of its says something, or after so long with nothing; then it is asked again.
_HEAR_S = 30.0
_ANSWER_S = 10.0
_PLACE_POLL_S = 1.0
# hear, tell, log_tail and stop, while one hear waits
_AGENT_THREADS = 4
_LOG_TAIL_BYTES = 16_000


@dataclass(frozen=True, slots=True)
class Demand:
    """What a gang takes of each of its nodes: ranks are contiguous, node by node."""

    ranks: int
    nodes: int
    device: str
    cpus_per_rank: float
    hardware_id: str

    @property
    def per_node(self) -> int:
        return self.ranks // self.nodes

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one node's share."""
        share = {"CPU": self.cpus_per_rank * self.per_node}
        return share | ({"GPU": float(self.per_node)} if self.device == "cuda" else {})

    def places(self, node: int) -> list[Place]:
        """Where the ranks of this node stand."""
        return [
            Place(
                rank=node * self.per_node + local_rank,
                world_size=self.ranks,
                device=self.device,
                threads=max(1, int(self.cpus_per_rank)),
                local_rank=local_rank,
                local_world_size=self.per_node,
            )
            for local_rank in range(self.per_node)
        ]


class RayGang:
    """``ranks`` processes in one group, on one node or evenly over several; see ``supervisor.Gang``.

    Args:
        among: ids of the living nodes of the demand's hardware; they may change while the gang waits for room.

    Raises:
        Unplaced: the cluster has had no room within the task's ``place_s``, or the wait was cancelled.
    """

    def __init__(
        self,
        demand: Demand,
        task: GangTask,
        among: Callable[[], tuple[str, ...]],
        cancelled: Callable[[], bool],
    ) -> None:
        self.demand = demand
        self.ranks, self.device, self.nodes = demand.ranks, demand.device, demand.nodes
        self.hardware_id = demand.hardware_id
        self._per_node = demand.per_node
        self._start_s = task.timers.start_s
        self._agents: list[Any] = []
        self._group = _place(demand, among, task.timers.place_s, cancelled)
        actor = ray.remote(NodeAgent)
        for node in range(self.nodes):
            options = actor.options(
                num_cpus=demand.bundle["CPU"],
                num_gpus=demand.bundle.get("GPU", 0),
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=_AGENT_THREADS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=node
                ),
            )
            self._agents.append(options.remote())
        self.begin()

    def begin(self) -> None:
        """Start the ranks, after :meth:`stop` again."""
        self._asked = [
            agent.begin.remote(self.demand.places(node), _HEAR_S) for node, agent in enumerate(self._agents)
        ]

    def send(self, task: GangTask) -> None:
        for agent in self._agents:
            agent.tell.remote((task.function, task.payload, task.host_limit_bytes))

    def receive(self, pending: set[int], timeout_s: float) -> list[tuple[int, Message]]:
        until = monotonic() + timeout_s
        while True:
            heard = self._receive(pending, max(0.0, until - monotonic()))
            if heard or monotonic() >= until:
                return heard

    def alive(self) -> bool:
        return all(_answers([agent.alive.remote() for agent in self._agents], _ANSWER_S))

    def log_tail(self, rank: int | None = None) -> str:
        if rank is None:
            tails = _answers([agent.log_tail.remote() for agent in self._agents], _ANSWER_S)
        else:
            tails = _answers([self._agents[rank // self._per_node].log_tail.remote(rank)], _ANSWER_S)
        return "\n".join(tail for tail in tails if tail)[-_LOG_TAIL_BYTES:]

    def homes(self) -> list[Home | None]:
        """Where the agents live, node by node; None for one that does not answer."""
        return _answers([agent.home.remote() for agent in self._agents], self._start_s)

    def stop(self, grace_s: float) -> bool:
        """End the ranks and keep their place on the nodes; False when some node does not answer."""
        return all(_answers([agent.stop.remote(grace_s) for agent in self._agents], grace_s + _ANSWER_S))

    def kill(self, grace_s: float) -> None:
        self.stop(grace_s)
        self.give_back()

    def give_back(self) -> None:
        """Leave the nodes."""
        for agent in self._agents:
            ray.kill(agent, no_restart=True)
        remove_placement_group(self._group)

    # -- within ----------------------------------------------------------------------------------------

    def _ranks_of(self, node: int) -> range:
        return range(node * self._per_node, (node + 1) * self._per_node)

    def _receive(self, pending: set[int], timeout_s: float) -> list[tuple[int, Message]]:
        asked = {self._asked[rank // self._per_node]: rank // self._per_node for rank in sorted(pending)}
        ready, _ = ray.wait(list(asked), num_returns=1, timeout=timeout_s)
        if ready:  # whoever else has answered by now is heard too
            ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0)
        heard: list[tuple[int, Message]] = []
        for ref in ready:
            node = asked[ref]
            for rank, message in self._answer(ref, node):
                if message[0] == "store":
                    self._introduce(message)
                elif rank in pending:
                    heard.append((rank, message))
            self._asked[node] = self._agents[node].hear.remote(_HEAR_S)
        return heard

    def _introduce(self, store: Message) -> None:
        """Rank 0 has opened the store: the others join it there."""
        for agent in self._agents:
            agent.tell.remote(store, but=0)

    def _answer(self, ref: Any, node: int) -> list[tuple[int, Message]]:
        try:
            answer: list[tuple[int, Message]] = ray.get(ref)
        except OutOfMemoryError as error:
            said: Message = ("error", "host_oom", f"its node ran out of memory: {_first_line(error)}")
        except RayError as error:
            said = ("error", "died", f"its node or its actor is gone: {_first_line(error)}")
        else:
            return answer
        return [(rank, said) for rank in self._ranks_of(node)]


def _answers(refs: list[Any], timeout_s: float) -> list[Any]:
    """What these calls return; None for what failed, or takes longer."""
    ready, _ = ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
    answers: list[Any] = []
    for ref in refs:
        try:
            answers.append(ray.get(ref) if ref in ready else None)
        except RayError:
            answers.append(None)
    return answers


def _place(
    demand: Demand,
    among: Callable[[], tuple[str, ...]],
    place_s: float,
    cancelled: Callable[[], bool],
) -> Any:
    """Reserve the nodes' shares: within one node, or on so many different ones, all of the demand's hardware."""
    until = monotonic() + place_s
    group: Any = None
    node_ids: tuple[str, ...] = ()
    try:
        while True:
            if (now := among()) != node_ids:
                if group is not None:
                    remove_placement_group(group)
                node_ids = now
                group = _reserve(demand, node_ids) if node_ids else None
            wait_s = min(_PLACE_POLL_S, max(0.01, until - monotonic()))
            if group is None:
                sleep(wait_s)
            elif group.wait(wait_s):
                return _checked(group, demand, node_ids)
            if cancelled():
                raise Unplaced(GangOutcome("cancelled", reason="cancelled while it waited for room"))
            if monotonic() >= until:
                reason = (
                    f"the cluster had no room for {demand.ranks} {demand.device} ranks within {place_s:g} s "
                    f"on its {len(node_ids)} nodes of {demand.hardware_id}"
                )
                raise Unplaced(GangOutcome("unplaced", reason=reason))
    except BaseException:
        if group is not None:
            remove_placement_group(group)
        raise


def _reserve(demand: Demand, node_ids: tuple[str, ...]) -> Any:
    return placement_group(
        [demand.bundle] * demand.nodes,
        strategy="STRICT_PACK" if demand.nodes == 1 else "STRICT_SPREAD",
        bundle_label_selector=[{"ray.io/node-id": f"in({','.join(node_ids)})"}] * demand.nodes,
    )


def _checked(group: Any, demand: Demand, node_ids: tuple[str, ...]) -> Any:
    """The group, when it stands where it was to: rows are stored under the hardware of these nodes."""
    stands = set(placement_group_table(group)["bundles_to_node_id"].values())
    if not stands <= set(node_ids):
        reason = f"Ray placed the gang on {sorted(stands - set(node_ids))}, not of {demand.hardware_id}"
        raise Unplaced(GangOutcome("unplaced", reason=reason))
    return group


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    # the first line of Ray's error is general; the one about the process says more
    telling = next((line for line in lines if "Worker exit" in line or "node" in line.lower()), None)
    return (telling or (lines[0] if lines else type(error).__name__))[:500]
