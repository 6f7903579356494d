"""The Ray actor that looks after a gang's ranks on one node.

The ranks are child processes of the actor, not the actor itself: a rank may then be limited, hang in a collective,
run out of memory or be killed, and the actor still says what happened and shows its log.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import monotonic

import psutil

from tuner.executors.base import Site
from tuner.executors.place import Place
from tuner.executors.supervisor import Message

# Progress that comes faster than this is passed on in one answer.
_GATHER_S = 0.1


@dataclass(frozen=True, slots=True)
class Home:
    """Where an agent lives, and the processes of its ranks."""

    address: str
    pid: int
    rank_pids: tuple[int, ...]


class NodeAgent:
    """Starts ranks, passes messages on, ends them. No rank outlives its agent: they share a lifeline.

    Args:
        places: where the ranks stand; the store's address comes with :meth:`tell`.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        from tuner.executors.gang import NodeRanks

        # a rank is not to run Ray's worker script as its main module
        vars(sys.modules["__main__"]).pop("__file__", None)
        self._address = _node_address()
        _use_interface_of(self._address)
        self._everyone = {place.rank for place in places}
        self._ranks = NodeRanks([replace(place, address=self._address) for place in places])
        self._hearing = threading.Lock()

    def home(self) -> Home:
        """Where this is."""
        return Home(self._address, os.getpid(), tuple(self._ranks.pids))

    def alive(self) -> bool:
        """Whether every rank's process runs."""
        return self._ranks.alive()

    def tell(self, message: Message, but: int | None = None) -> None:
        """Pass a message to every rank, or to all but one."""
        self._ranks.tell(message, but=but)

    def hear(self, wait_s: float) -> list[tuple[int, Message]]:
        """What the ranks say next; nothing after ``wait_s``. A rank that has ended says so, once."""
        with self._hearing:
            heard = self._ranks.receive(self._everyone, wait_s)
            until = monotonic() + _GATHER_S
            while heard and all(m[0] == "progress" for _, m in heard) and (left := until - monotonic()) > 0:
                heard += self._ranks.receive(self._everyone, left)
            return heard

    def log_tail(self, rank: int | None = None) -> str:
        """The end of what one rank, or every rank here, has printed since it was last told something."""
        return self._ranks.log_tail(rank)

    def stop(self, grace_s: float) -> None:
        """End the ranks, at the latest after ``grace_s``."""
        self._ranks.end(grace_s)
        with self._hearing:
            self._ranks.forget()


def describe(device: str, several: bool) -> Site:
    """Run on a node: what it is, alone or as one of several."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # Ray hides the cards from a task that takes none
        del os.environ["CUDA_VISIBLE_DEVICES"]
    from tuner.executors.local import local_site

    return local_site(device, _network(device) if several else None)


def _network(device: str) -> str:
    """The network's class; where nobody can say, a name that holds for this cluster, until it is stopped."""
    import ray

    from tuner.network import network_name

    session = ray.get_runtime_context().get_session_name()
    return network_name(_node_address(), device) or f"unnamed-{session}"


def _node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _use_interface_of(address: str) -> None:
    """Gloo and NCCL talk over the interface that the cluster knows this node by, unless told otherwise."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
    os.environ.setdefault("NCCL_DEBUG", "WARN")
