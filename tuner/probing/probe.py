"""Measure this machine, or nodes of a cluster, into the form a cluster is planned with: ``flatpeak probe``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Literal

from cost_model.errors import RuleError
from cost_model.topology import Fabric
from operators.ranks import Ranks
from tuner.executors.base import Executor, GangTask, Timers
from tuner.executors.local import LocalExecutor
from tuner.machine.fingerprint import bare_cluster
from tuner.probing.cluster import ProbeResult, probe_result
from tuner.probing.rank import measure_rank

Device = Literal["cpu", "cuda"]
LIMIT_S = 300.0
# what is under way when the time is up still ends, and starting is not counted
_BEYOND_S = 300.0


def probe_machine(
    *,
    ranks: int | None = None,
    nodes: int = 1,
    device: str | None = None,
    executor: Executor | None = None,
    fabric: Fabric | None = None,
    limit_s: float = LIMIT_S,
    progress: Callable[[str], None] | None = None,
) -> ProbeResult:
    """Run real ranks and measure rates, transfers by tier, host links and memory of their nodes.

    Args:
        ranks: how many, evenly over the nodes, on CUDA at most one a card; by default every card, or one a node.
        nodes: over how many nodes; several need an executor of a cluster.
        device: ``cpu``, ``cuda``, or None for CUDA where there is a card.
        executor: who runs the ranks; by default this machine. It is not closed.
        fabric: the switches above the nodes, where they are known: the cluster keeps them, and links say how many
            levels they cross.
        limit_s: after so long no further size and no further pair is measured.
        progress: told of each part as it begins.

    Raises:
        RuleError: no such device, or the ranks did not come through (with their reason).
    """
    say = progress or (lambda _text: None)
    runner = LocalExecutor() if executor is None else executor
    try:
        chosen = _device(device, runner)
        count = _ranks(ranks, nodes, chosen, runner)
        say(f"starting {count} ranks on {chosen}" + (f" over {nodes} nodes" if nodes > 1 else ""))
        task = _task(chosen, nodes, count, limit_s)
        outcome = runner.run(task, on_progress=lambda rank, said: say(said["part"]) if rank == 0 else None)
        network = runner.site(chosen, nodes).software.get("network") if outcome.ok and nodes > 1 else None
    finally:
        if executor is None:
            runner.close()
    if not outcome.ok:
        raise RuleError(
            rule="every rank of a probe must answer",
            value=outcome.kind if outcome.rank is None else f"rank {outcome.rank}: {outcome.kind}",
            remedy=f"Probe with fewer ranks, or free the machine ({outcome.reason or outcome.log_tail}).",
        )
    return probe_result(outcome.results, nodes=nodes, device=chosen, network=network, fabric=fabric)


def _device(device: str | None, executor: Executor) -> Device:
    cuda = device != "cpu" and executor.max_ranks("cuda") > 0
    if device is None:
        return "cuda" if cuda else "cpu"
    if device not in ("cpu", "cuda") or (device == "cuda" and not cuda):
        raise RuleError(
            rule="a probe runs on 'cpu', or on 'cuda' where there is a card",
            value=device,
            remedy="Use --device cpu, or leave it out.",
        )
    return "cuda" if device == "cuda" else "cpu"


def _ranks(ranks: int | None, nodes: int, device: Device, executor: Executor) -> int:
    if ranks is None:
        return nodes * _cards(nodes, executor) if device == "cuda" else nodes
    if ranks % nodes:
        raise RuleError(
            rule="the ranks of a probe stand evenly on its nodes",
            value=f"{ranks} ranks on {nodes} nodes",
            remedy="Make --ranks a multiple of --nodes.",
        )
    return ranks


def _cards(nodes: int, executor: Executor) -> int:
    """Most cards that each of so many nodes has."""
    most = executor.max_ranks("cuda") // nodes
    fitting = (
        n for n in range(most, 1, -1) if executor.refusal(_task("cuda", nodes, n * nodes, 0.0)) is None
    )
    return next(fitting, 1)


def _task(device: Device, nodes: int, ranks: int, limit_s: float) -> GangTask:
    return GangTask(
        "tuner.probing.probe:_probe_task",
        {"device": device, "nodes": nodes, "limit_s": limit_s},
        ranks,
        device=device,
        nodes=nodes,
        timers=Timers(run_s=limit_s + _BEYOND_S),
    )


def _probe_task(
    ranks: Ranks, payload: dict[str, Any], report: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """What a rank runs; plain values, because they cross a pipe."""
    figures = measure_rank(
        ranks,
        payload["device"],
        nodes=payload["nodes"],
        limit_s=payload["limit_s"],
        on_part=lambda part: report({"part": part}),
    )
    kind = bare_cluster(figures.hardware).hardware_id
    return asdict(figures) | {"kind": kind}
