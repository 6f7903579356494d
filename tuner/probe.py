"""Measure this machine into the form a cluster is planned with: ``flatpeak probe``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

import numpy as np
import torch

from cost_model.cluster_spec import ClusterSpec, Figure, HostSpec, LinkTier
from cost_model.errors import RuleError
from operators.ranks import Ranks
from tuner.executors.base import GangTask, Timers
from tuner.executors.local import LocalExecutor
from tuner.fingerprint import bare_cluster, local_hardware
from tuner.probe_rank import measure_rank

# On a CPU the ranks' "cards" and the "host" are the same memory: half of it plays each, so that a plan for this
# machine cannot count a byte twice.
_CPU_CARD_SHARE = 0.5
# A process with torch loaded, before it holds a tensor.
_CPU_OUTSIDE_BYTES = 0.25 * 2**30

Device = Literal["cpu", "cuda"]
Transfers = dict[str, list[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The machine as a cluster, and the transfer curves behind its links.

    ``transfers`` holds, for ``all_to_all`` and ``ring``, (bytes a rank sends, seconds) of the slowest rank.
    """

    cluster: ClusterSpec
    transfers: Transfers


def probe_machine(
    *, ranks: int, device: str | None = None, progress: Callable[[str], None] | None = None
) -> ProbeResult:
    """Run ``ranks`` real ranks on this machine and measure its rates, transfers and memory.

    Args:
        ranks: how many; on CUDA at most one a card.
        device: ``cpu``, ``cuda``, or None for CUDA where there is a card.
        progress: told of each part as it begins.

    Raises:
        RuleError: no such device, or the ranks did not come through (with their reason).
    """
    hardware = local_hardware()
    chosen = _device(device)
    say = progress or (lambda _text: None)
    say(f"starting {ranks} ranks on {chosen}")
    executor = LocalExecutor()
    try:
        task = GangTask(
            "tuner.probe:_probe_task",
            {"device": chosen},
            ranks,
            device=chosen,
            timers=Timers(run_s=900.0),
        )
        outcome = executor.run(task, on_progress=lambda rank, said: say(said["part"]) if rank == 0 else None)
    finally:
        executor.close()
    if not outcome.ok:
        raise RuleError(
            rule="every rank of a probe must answer",
            value=f"rank {outcome.rank}: {outcome.kind}",
            remedy=f"{outcome.reason or outcome.log_tail} Probe with fewer ranks, or free the machine.",
        )
    return _result(hardware, chosen, outcome.results)


def _device(device: str | None) -> Device:
    cuda = torch.cuda.is_available()
    if device is None:
        return "cuda" if cuda else "cpu"
    if device not in ("cpu", "cuda") or (device == "cuda" and not cuda):
        raise RuleError(
            rule="a probe runs on 'cpu', or on 'cuda' where there is a card",
            value=device,
            remedy="Use --device cpu, or leave it out.",
        )
    return "cuda" if device == "cuda" else "cpu"


def _probe_task(
    ranks: Ranks, payload: dict[str, Any], report: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """What a rank runs; JSON, because it crosses a pipe."""
    figures = measure_rank(ranks, payload["device"], on_part=lambda part: report({"part": part}))
    return {
        "gemm_flops": figures.gemm_flops,
        "memory_bytes_per_s": figures.memory_bytes_per_s,
        "host_link_bytes_per_s": figures.host_link_bytes_per_s,
        "host_link_alone_bytes_per_s": figures.host_link_alone_bytes_per_s,
        "adam_params_per_s": figures.adam_params_per_s,
        "all_to_all": [(p.nbytes, p.seconds) for p in figures.all_to_all],
        "ring": [(p.nbytes, p.seconds) for p in figures.ring],
    }


def _result(hardware: dict[str, Any], device: Device, answers: Sequence[dict[str, Any]]) -> ProbeResult:
    ranks = len(answers)

    def typical(key: str) -> Figure:
        return Figure(median(answer[key] for answer in answers), "measured")

    transfers: Transfers = {
        name: [
            (int(nbytes), max(answer[name][i][1] for answer in answers))
            for i, (nbytes, _seconds) in enumerate(answers[0][name])
        ]
        for name in ("all_to_all", "ring")
    }
    latency, bandwidth = link_fit(_on_the_wire(transfers["all_to_all"], ranks))
    bare = bare_cluster(hardware)
    ram = float(hardware["ram_bytes"])
    cards = float(hardware["hbm_bytes"])
    if device == "cpu":
        cards, ram = ram * _CPU_CARD_SHARE / ranks, ram * (1.0 - _CPU_CARD_SHARE)
    # ranks share the host's memory: one that copies alone is faster
    by_itself = answers[0]["host_link_alone_bytes_per_s"]
    alone = () if by_itself is None else ((1, Figure(float(by_itself), "measured")),)
    host = HostSpec(
        ram_bytes=Figure(ram, "measured"),
        cores=hardware["cores"],
        cpu_name=hardware["cpu_name"],
        link_bytes_per_s=(*alone, (ranks, typical("host_link_bytes_per_s"))),
        cpu_adam_params_per_s=Figure(sum(a["adam_params_per_s"] for a in answers), "measured"),
    )
    cluster = replace(
        bare,
        gpus_per_node=ranks,
        gpu=replace(
            bare.gpu,
            device=device,
            hbm_bytes=Figure(cards, "measured"),
            peak_flops=typical("gemm_flops"),
            hbm_bandwidth_bytes_per_s=typical("memory_bytes_per_s"),
        ),
        host=host,
        tiers=(
            LinkTier("node", bare.tiers[0].name, Figure(latency, "measured"), Figure(bandwidth, "measured")),
        ),
    )
    if device == "cpu":
        cluster = replace(cluster, outside_allocator_bytes=Figure(_CPU_OUTSIDE_BYTES, "assumed"))
    return ProbeResult(cluster, transfers)


def _on_the_wire(curve: Sequence[tuple[int, float]], ranks: int) -> list[tuple[float, float]]:
    """An all-to-all keeps a rank's own share: only (P-1)/P of its bytes travel."""
    share = (ranks - 1) / ranks if ranks > 1 else 1.0
    return [(nbytes * share, seconds) for nbytes, seconds in curve]


def link_fit(curve: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(α seconds, B bytes/s) of seconds = α + bytes/B, by least squares on relative errors.

    Both come out positive: a curve whose best α is not is fitted through its smallest time.
    """
    nbytes = np.array([n for n, _ in curve], dtype=np.float64)
    seconds = np.array([s for _, s in curve], dtype=np.float64)
    design = np.stack([1.0 / seconds, nbytes / seconds], axis=1)
    (latency, per_byte), *_ = np.linalg.lstsq(design, np.ones_like(seconds), rcond=None)
    if latency <= 0:
        latency = float(seconds.min())
    if per_byte <= 0:
        per_byte = float(seconds[-1] / nbytes[-1])
    return float(latency), float(1.0 / per_byte)
