"""A gang on a Ray cluster: a placement group with one bundle a node, and one actor a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tuner.executors.base import GangOutcome, GangTask
from tuner.executors.place import Place
from tuner.executors.ray_agent import Home, RankAgent
from tuner.executors.supervisor import Message, Unplaced

# An agent answers when its rank says something, or after so long with nothing; then it is asked again.
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
    node_ids: tuple[str, ...] = ()

    @property
    def per_node(self) -> int:
        return self.ranks // self.nodes

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one node's share."""
        share = {"CPU": self.cpus_per_rank * self.per_node}
        return share | ({"GPU": float(self.per_node)} if self.device == "cuda" else {})


class RayGang:
    """``ranks`` processes in one group, on one node or evenly over several; see ``supervisor.Gang``.

    Raises:
        Unplaced: the cluster has had no room within the task's ``place_s``, or the wait was cancelled.
    """

    def __init__(self, demand: Demand, task: GangTask, cancelled: Callable[[], bool]) -> None:
        self.ranks, self.device, self.nodes = demand.ranks, demand.device, demand.nodes
        self._agents: list[Any] = []
        self._asked: dict[int, Any] = {}
        self._group = _place(demand, task.timers.place_s, cancelled)
        actor = ray.remote(RankAgent)
        threads = max(1, int(demand.cpus_per_rank))
        for rank in range(self.ranks):
            node, local_rank = divmod(rank, demand.per_node)
            place = Place(
                rank=rank,
                world_size=self.ranks,
                device=self.device,
                threads=threads,
                local_rank=local_rank,
                local_world_size=demand.per_node,
            )
            options = actor.options(
                num_cpus=demand.cpus_per_rank,
                num_gpus=1 if self.device == "cuda" else 0,
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=_AGENT_THREADS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=node
                ),
            )
            self._agents.append(options.remote(place))
        for rank in range(self.ranks):
            self._ask(rank)

    def send(self, task: GangTask) -> None:
        message = (task.function, task.payload, task.host_limit_bytes)
        for agent in self._agents:
            agent.tell.remote(message)

    def receive(self, pending: set[int], timeout_s: float) -> list[tuple[int, Message]]:
        until = monotonic() + timeout_s
        while True:
            heard = self._receive(pending, max(0.0, until - monotonic()))
            if heard or monotonic() >= until:
                return heard

    def alive(self) -> bool:
        return all(self._ask_all([agent.alive.remote() for agent in self._agents], _ANSWER_S))

    def log_tail(self, rank: int | None = None) -> str:
        asked = range(self.ranks) if rank is None else [rank]
        tails = self._ask_all([self._agents[r].log_tail.remote() for r in asked], _ANSWER_S)
        said = [f"rank {r}:\n{tail}" for r, tail in zip(asked, tails, strict=True) if tail]
        return "\n".join(said)[-_LOG_TAIL_BYTES:]

    def homes(self) -> list[Home | None]:
        """Where the agents live; None for one that does not answer."""
        return self._ask_all([agent.home.remote() for agent in self._agents], _ANSWER_S)

    def kill(self, grace_s: float) -> None:
        self._ask_all([agent.stop.remote(grace_s) for agent in self._agents], grace_s + _ANSWER_S)
        for agent in self._agents:
            ray.kill(agent, no_restart=True)
        remove_placement_group(self._group)
        self._agents, self._asked = [], {}

    # -- within ----------------------------------------------------------------------------------------

    def _ask(self, rank: int) -> None:
        self._asked[rank] = self._agents[rank].hear.remote(_HEAR_S)

    def _receive(self, pending: set[int], timeout_s: float) -> list[tuple[int, Message]]:
        asked = {self._asked[rank]: rank for rank in sorted(pending)}
        ready, _ = ray.wait(list(asked), num_returns=1, timeout=timeout_s)
        if ready:  # whoever else has answered by now is heard too
            ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0)
        heard: list[tuple[int, Message]] = []
        for ref in ready:
            rank = asked[ref]
            for message in self._answer(ref):
                if message[0] == "store":
                    self._introduce(message)
                else:
                    heard.append((rank, message))
            self._ask(rank)
        return heard

    def _introduce(self, store: Message) -> None:
        """Rank 0 has opened the store: the others join it there."""
        for agent in self._agents[1:]:
            agent.tell.remote(store)

    @staticmethod
    def _answer(ref: Any) -> Sequence[Message]:
        try:
            answer: list[Message] = ray.get(ref)
        except OutOfMemoryError as error:
            return [("error", "host_oom", f"its node ran out of memory: {_first_line(error)}")]
        except RayError as error:
            return [("error", "died", f"its node or its actor is gone: {_first_line(error)}")]
        return answer

    @staticmethod
    def _ask_all(refs: list[Any], timeout_s: float) -> list[Any]:
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
        answers: list[Any] = []
        for ref in refs:
            try:
                answers.append(ray.get(ref) if ref in ready else None)
            except RayError:
                answers.append(None)
        return answers


def _place(demand: Demand, place_s: float, cancelled: Callable[[], bool]) -> Any:
    """Reserve the nodes' shares: within one node, or on so many different ones."""
    options: dict[str, Any] = {}
    if demand.node_ids:
        among = {"ray.io/node-id": f"in({','.join(demand.node_ids)})"}
        options["bundle_label_selector"] = [among] * demand.nodes
    group = placement_group(
        [demand.bundle] * demand.nodes,
        strategy="STRICT_PACK" if demand.nodes == 1 else "STRICT_SPREAD",
        **options,
    )
    until = monotonic() + place_s
    try:
        while not group.wait(min(_PLACE_POLL_S, max(0.01, until - monotonic()))):
            if cancelled():
                raise Unplaced(GangOutcome("cancelled", reason="cancelled while it waited for room"))
            if monotonic() >= until:
                reason = (
                    f"the cluster had no room for {demand.ranks} {demand.device} ranks within {place_s:g} s"
                )
                raise Unplaced(GangOutcome("unplaced", reason=reason))
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    # the first line of Ray's error is general; the one about the process says more
    telling = next((line for line in lines if "Worker exit" in line or "node" in line.lower()), None)
    return (telling or (lines[0] if lines else type(error).__name__))[:500]
