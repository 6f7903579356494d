"""Gangs on this machine: one real process a rank, gloo on the CPU, NCCL on CUDA cards."""

from __future__ import annotations

import torch

from tuner.executors.base import GangOutcome, GangTask, Site
from tuner.executors.gang import LocalGang
from tuner.executors.supervisor import Cancelled, GangExecutor, Unplaced
from tuner.machine.fingerprint import local_hardware, local_hardware_id, local_software


class LocalExecutor(GangExecutor):
    """Runs one task at a time; see :class:`tuner.executors.base.Executor`.

    Args:
        max_cpu_ranks: largest gang on the CPU. Ranks may outnumber the cores: they take turns.
    """

    def __init__(self, max_cpu_ranks: int = 64) -> None:
        super().__init__()
        self._max_cpu_ranks = max_cpu_ranks

    def max_ranks(self, device: str) -> int:
        if device == "cuda":
            return torch.cuda.device_count() if torch.cuda.is_available() else 0
        return self._max_cpu_ranks

    def site(self, device: str, nodes: int = 1, hardware_id: str | None = None) -> Site:
        del nodes, hardware_id  # there is one of each
        return local_site(device)

    def pids(self) -> list[int]:
        """Processes of the warm gang."""
        gang = self._gang
        return gang.pids if isinstance(gang, LocalGang) else []

    def refusal(self, task: GangTask) -> str | None:
        if task.nodes > 1:
            return f"this machine is one node, not {task.nodes}: use a cluster (--executor ray)"
        limit = self.max_ranks(task.device)
        if task.ranks > limit:
            return f"this machine has room for {limit} {task.device} ranks, not for {task.ranks}"
        return None

    def make(self, task: GangTask, cancelled: Cancelled) -> LocalGang:
        del cancelled
        here = self.site(task.device).hardware_id
        if task.hardware_id not in (None, here):
            reason = f"the task is bound to {task.hardware_id}, here is {here}"
            raise Unplaced(GangOutcome("unplaced", reason=reason))
        return LocalGang(task.ranks, task.device, here)


def local_site(device: str, network: str | None = None) -> Site:
    """This machine, alone or as one of several that ``network`` joins."""
    hardware = local_hardware(device)
    memory = hardware["hbm_bytes"] if device == "cuda" else hardware["ram_bytes"]
    software = local_software() | ({} if network is None else {"network": network})
    return Site(local_hardware_id(device, network), software, int(memory))
