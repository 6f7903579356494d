"""The Ray actor that looks after one rank on the rank's own node.

The rank is a child process of the actor, not the actor itself: a rank may then be limited, hang in a collective,
run out of memory or be killed, and the actor still says what happened and shows its log.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from time import monotonic

import psutil

from tuner.executors.base import Site
from tuner.executors.deaths import kernel_oom_kills, why_died
from tuner.executors.place import Place
from tuner.executors.supervisor import Message

LOG_TAIL_BYTES = 8_000
# Progress that comes faster than this is passed on in one answer.
_GATHER_S = 0.1


@dataclass(frozen=True, slots=True)
class Home:
    """Where an agent lives."""

    address: str
    pid: int
    rank_pid: int


class RankAgent:
    """Starts one rank, passes messages on, ends it. The rank cannot outlive its agent: they share a lifeline.

    Args:
        place: where the rank stands; the store's address comes with :meth:`tell`.
        address: this node's address, by which the other ranks reach it; Ray's by default.
    """

    def __init__(self, place: Place, address: str | None = None) -> None:
        self._address = address or _node_address()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - without a name: nothing is left, however we end
        self._pipe, theirs = Pipe()
        self._lifeline, end = Pipe()
        self._kills, self._log_start = kernel_oom_kills(), 0
        self._last_words: Message | None = None
        self._hearing = threading.Lock()
        # Ray shows an actor the one card that is its own
        place = replace(place, card=0 if place.device == "cuda" else None, address=self._address)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tuner.executors.rank_main", str(theirs.fileno()), str(end.fileno())],
            pass_fds=[theirs.fileno(), end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=self._environment(),
        )
        theirs.close()
        end.close()
        self._pipe.send(place)

    def home(self) -> Home:
        """Where this is."""
        return Home(self._address, os.getpid(), self._process.pid)

    def alive(self) -> bool:
        """Whether the rank's process runs."""
        return self._process.poll() is None

    def tell(self, message: Message) -> None:
        """Pass a message to the rank; one that is gone is noticed by :meth:`hear`."""
        self._kills, self._log_start = kernel_oom_kills(), self._log_size()
        try:
            self._pipe.send(message)
        except OSError:
            return

    def hear(self, wait_s: float) -> list[Message]:
        """What the rank says next, all of it; nothing after ``wait_s``. A rank that has ended says so."""
        with self._hearing:
            if self._last_words is not None:
                return [self._last_words]
            heard: list[Message] = []
            until = monotonic() + wait_s
            try:
                while self._pipe.poll(max(0.0, until - monotonic())):
                    heard.append(self._pipe.recv())
                    if heard[-1][0] != "progress":
                        break
                    until = min(until, monotonic() + _GATHER_S)
            except (EOFError, OSError):
                self._last_words = ("error", *why_died(self._exit_code(), self._kills))
                heard.append(self._last_words)
            return heard

    def log_tail(self) -> str:
        """The end of what the rank has printed since it was last told something."""
        start = max(self._log_start, self._log_size() - LOG_TAIL_BYTES)
        said = os.pread(self._log.fileno(), LOG_TAIL_BYTES, start)
        return said.decode(errors="replace").strip()

    def stop(self, grace_s: float) -> None:
        """End the rank, at the latest after ``grace_s``."""
        self._process.terminate()
        try:
            self._process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _log_size(self) -> int:
        return os.fstat(self._log.fileno()).st_size

    def _exit_code(self) -> int | None:
        try:
            return self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return None

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(path or "." for path in sys.path)
        # the token is for who talks to the cluster; a rank does not
        for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
            environment.pop(name, None)
        if (interface := _interface_of(self._address)) is not None:
            environment.setdefault("GLOO_SOCKET_IFNAME", interface)
            environment.setdefault("NCCL_SOCKET_IFNAME", interface)
        environment.setdefault("NCCL_DEBUG", "WARN")
        return environment


def describe(device: str) -> Site:
    """Run on a node: what it is."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # Ray hides the cards from a task that takes none
        del os.environ["CUDA_VISIBLE_DEVICES"]
    from tuner.executors.local import local_site

    return local_site(device)


def _node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _interface_of(address: str) -> str | None:
    """The network interface that has this address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return str(name)
    return None
