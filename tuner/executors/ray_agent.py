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
from typing import TYPE_CHECKING

import psutil

from tuner.executors.base import Site
from tuner.executors.place import Place
from tuner.executors.supervisor import Message

if TYPE_CHECKING:
    from tuner.executors.gang import NodeRanks

# Another node's ranks may be told something before these have started: the fork server loads torch.
_START_S = 120.0
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

    The agent stays for the next gang: its fork server has loaded what ranks need, so theirs start in no time.
    """

    def __init__(self) -> None:
        # a rank is not to run Ray's worker script as its main module
        vars(sys.modules["__main__"]).pop("__file__", None)
        self._address = _node_address()
        _use_interface_of(self._address)
        self._ranks: NodeRanks | None = None
        self._started, self._stopping = threading.Event(), threading.Event()
        self._changing, self._hearing = threading.Lock(), threading.Lock()

    def begin(self, places: Sequence[Place], wait_s: float) -> list[tuple[int, Message]]:
        """Start ranks and :meth:`hear` them.

        Args:
            places: where they stand; the store's address comes with :meth:`tell`.
        """
        from tuner.executors.gang import NodeRanks

        with self._changing:
            self._stopping.clear()
            self._ranks = NodeRanks([replace(place, address=self._address) for place in places])
            self._started.set()
        return self.hear(wait_s)

    def home(self) -> Home:
        """Where this is, once its ranks have been started."""
        self._started.wait(_START_S)
        return Home(self._address, os.getpid(), tuple(self._ranks.pids if self._ranks else ()))

    def alive(self) -> bool:
        """Whether every rank's process runs."""
        return self._ranks is not None and self._ranks.alive()

    def tell(self, message: Message, but: int | None = None) -> None:
        """Pass a message to every rank, or to all but one. Other nodes may be faster: here ranks may be starting."""
        if self._started.wait(_START_S) and self._ranks is not None:
            self._ranks.tell(message, but=but)

    def hear(self, wait_s: float) -> list[tuple[int, Message]]:
        """What the ranks say next; nothing after ``wait_s``. A rank that has ended says so, once."""
        with self._hearing:
            if (ranks := self._ranks) is None:
                return []
            everyone = ranks.talking()
            if not everyone:
                self._stopping.wait(wait_s)
                return []
            heard = ranks.receive(everyone, wait_s)
            until = monotonic() + _GATHER_S
            while heard and all(m[0] == "progress" for _, m in heard) and (left := until - monotonic()) > 0:
                heard += ranks.receive(everyone, left)
            return heard

    def log_tail(self, rank: int | None = None) -> str:
        """The end of what one rank, or every rank here, has printed since it was last told something."""
        return self._ranks.log_tail(rank) if self._ranks else ""

    def stop(self, grace_s: float) -> bool:
        """End the ranks, at the latest after ``grace_s``; others may begin then."""
        with self._changing:
            self._stopping.set()
            if self._ranks is not None:
                self._ranks.end(grace_s)
                with self._hearing:  # whoever was in it has been woken
                    self._ranks.forget()
                    self._ranks = None
            self._started.clear()
        return True


def describe(device: str, several: bool) -> Site:
    """Run on a node: what it is, alone or as one of several."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # Ray hides the cards from a task that takes none
        del os.environ["CUDA_VISIBLE_DEVICES"]
    from tuner.executors.local import local_site

    return local_site(device, _network(device) if several else None)


def _network(device: str) -> str:
    """The network's class; where nobody can say, a name that holds for this cluster, until it is stopped."""
    import ray

    from tuner.machine.network import network_name

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
