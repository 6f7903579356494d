"""Hosts in network namespaces of one machine, with a link of a given rate and one Ray node each.

Every host has an interface of its own, joined to the others by a bridge in a further namespace; a token bucket
(``tc tbf``) at both ends of each cable holds every direction to the rate. Nothing is added to the machine's own
network. Linux, root and iproute2 are needed.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from cost_model.errors import RuleError
from tuner.machine.network import VARIABLE
from tuner.machine.process_start import process_start

_PREFIX = "flatpeak"
_OURS = re.compile(rf"{_PREFIX}-(\d+)-(\d+)-(?:wire|host\d+)")
_FOLDER = re.compile(r"fp-(\d+)-(\d+)")
_FOLDERS = Path("/tmp")
_PORT = 6379
_START_S, _STOP_S = 60.0, 10.0
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_STORE_BYTES = 80 * 2**20


def why_not() -> str | None:
    """Why this machine cannot have such hosts; None when it can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    for tool in ("ip", "tc", "setpriv"):
        if shutil.which(tool) is None:
            return f"there is no {tool} (packages iproute2, util-linux)"
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    name = f"{_owner()}-wire"
    try:
        _do("ip", "netns", "add", name)
    except RuleError as error:
        return f"a network namespace cannot be made: {error.value}"
    try:
        _do("ip", "-n", name, "link", "add", "name", "end0", "type", "veth", "peer", "name", "end1")
        _do("tc", "-n", name, "qdisc", "add", "dev", "end0", "root", *_bucket(1e8))
    except RuleError as error:
        return f"no veth, or no token bucket: {error.value}"
    finally:
        _remove(name)
    return None


def rate_of(text: str) -> float:
    """Bits a second of ``100mbit``, ``1gbit``.

    Raises:
        RuleError: it is not such a rate.
    """
    found = re.fullmatch(r"([1-9]\d*)([kmg]bit)", text)
    if found is None:
        raise RuleError(rule="a rate is a number of kbit, mbit or gbit", value=text, remedy="Say 100mbit.")
    return int(found.group(1)) * _UNITS[found.group(2)]


class Hosts:
    """Hosts joined at one rate while the ``with`` block lasts; see the module.

    What an earlier owner left that was killed is removed first. SIGTERM ends the block like an exception. When this
    process is killed outright its hosts' processes are told to end; their namespaces stay until the next owner comes.

    Attributes:
        rate: of each direction of each host's link.
        network: what the nodes call their network (``FLATPEAK_NETWORK``).
        names, addresses: of the hosts' namespaces and interfaces.
        address: ``host:port`` of the Ray cluster, reachable inside.
        folder: everything that the hosts' processes write goes there; it ends with them.

    Args:
        cpus: that Ray counts on each host; they are the machine's, shared.
        ray: whether the hosts get a Ray node each, or stay bare.

    Raises:
        RuleError: this machine cannot have them, or a Ray node did not start (with its log).
    """

    def __init__(self, rate: str, *, hosts: int = 2, cpus: int = 2, ray: bool = True) -> None:
        self.rate, self.network = rate, f"tbf-{rate}"
        self._bits = rate_of(rate)
        self._hosts, self._cpus, self._ray = hosts, cpus, ray
        self._stem = _owner()
        self.names = [f"{self._stem}-host{i}" for i in range(hosts)]
        self.addresses = [f"10.77.0.{i + 1}" for i in range(hosts)]
        self.address = f"{self.addresses[0]}:{_PORT}"
        self.folder = Path()
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._handler: Any = None
        self._environment: dict[str, str] = {}

    def __enter__(self) -> Self:
        if (reason := why_not()) is not None:
            raise RuleError(
                rule="hosts in network namespaces need root, iproute2 and the token bucket",
                value=reason,
                remedy="Run as root on Linux with iproute2 installed.",
            )
        remove_stale()
        # sockets have short names, so the folder's is short too
        self.folder = _FOLDERS / f"fp-{self._stem.partition('-')[2]}"
        self.folder.mkdir(mode=0o700)
        self._environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "TMPDIR": str(self.folder),
            "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
            VARIABLE: self.network,
        }
        if threading.current_thread() is threading.main_thread() and (
            signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        ):
            self._handler = signal.signal(signal.SIGTERM, _leave)
        try:
            self._join()
            if self._ray:
                self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self,
        command: Sequence[str],
        *,
        host: int = 0,
        timeout_s: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host, with the cluster's token; its output is captured, its exit code is not judged."""
        return subprocess.run(
            _inside(self.names[host], command),
            env={**os.environ, **self._environment, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def pids(self) -> list[int]:
        """Processes that run on the hosts."""
        return [pid for name in self.names for pid in pids_in(name)]

    def close(self) -> None:
        """End the nodes and everything that runs on the hosts, and remove the hosts."""
        for node in self._nodes:
            node.terminate()
        for name in [*self.names, f"{self._stem}-wire"]:
            _remove(name)
        for node in self._nodes:
            node.wait()
        self._nodes.clear()
        if self.folder != Path():
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)
            self._handler = None

    # -- within ----------------------------------------------------------------------------------------

    def _join(self) -> None:
        wire = f"{self._stem}-wire"
        for name in [wire, *self.names]:
            _do("ip", "netns", "add", name)
        _do("ip", "-n", wire, "link", "add", "name", "bridge", "type", "bridge")
        _do("ip", "-n", wire, "link", "set", "bridge", "up")
        for i, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            end = f"port{i}"
            _do(
                "ip",
                "-n",
                wire,
                "link",
                "add",
                "name",
                end,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                name,
            )
            _do("ip", "-n", wire, "link", "set", end, "master", "bridge", "up")
            _do("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _do("ip", "-n", name, "link", "set", device, "up")
            _do("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *_bucket(self._bits))
            _do("tc", "-n", wire, "qdisc", "add", "dev", end, "root", *_bucket(self._bits))

    def _start(self) -> None:
        common = [
            *("--block", f"--num-cpus={self._cpus}", "--num-gpus=0", f"--object-store-memory={_STORE_BYTES}"),
            f"--temp-dir={self.folder}",
        ]
        self._node(0, ["--head", f"--port={_PORT}", "--include-dashboard=false", *common])
        self._wait([0])
        for host in range(1, self._hosts):
            self._node(host, [f"--address={self.address}", *common])
        self._wait(range(1, self._hosts))

    def _node(self, host: int, options: Sequence[str]) -> None:
        ray = Path(sys.executable).parent / "ray"
        command = [str(ray), "start", f"--node-ip-address={self.addresses[host]}", *options]
        with self._log(host).open("wb") as log:
            self._nodes.append(
                subprocess.Popen(
                    ["setpriv", "--pdeathsig", "TERM", "--", *_inside(self.names[host], command)],
                    env={**os.environ, **self._environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

    def _wait(self, hosts: Sequence[int]) -> None:
        until = time.monotonic() + _START_S
        waiting = set(hosts)
        while waiting:
            waiting = {host for host in waiting if "Ray runtime started" not in self._said(host)}
            dead = [host for host in waiting if self._nodes[host].poll() is not None]
            if dead or (waiting and time.monotonic() > until):
                host = min(dead or waiting)
                raise RuleError(
                    rule=f"a Ray node must start on every host within {_START_S:g} s",
                    value=f"host {host}: {self._said(host)[-1000:].strip()}",
                    remedy="Read its log above; free memory or cores.",
                )
            time.sleep(0.05)

    def _said(self, host: int) -> str:
        return self._log(host).read_text(encoding="utf-8", errors="replace")

    def _log(self, host: int) -> Path:
        return self.folder / f"node{host}.log"


def remove_stale() -> list[str]:
    """Remove namespaces whose owner was killed, with whatever still runs there, and its folder; their names."""
    removed = [name for name in namespaces() if _is_orphan(_OURS.fullmatch(name))]
    for name in removed:
        _remove(name)
    for folder in _FOLDERS.glob("fp-*"):
        if _is_orphan(_FOLDER.fullmatch(folder.name)):
            shutil.rmtree(folder, ignore_errors=True)
    return removed


def _is_orphan(owner: re.Match[str] | None) -> bool:
    return owner is not None and process_start(int(owner.group(1))) != owner.group(2)


def namespaces() -> list[str]:
    """Namespaces of such hosts that there are now, whoever owns them."""
    listed = _do("ip", "netns", "list").splitlines()
    return [line.split()[0] for line in listed if line.startswith(f"{_PREFIX}-")]


def _leave(number: int, frame: FrameType | None) -> None:
    del frame
    raise SystemExit(128 + number)


def _owner() -> str:
    """This process: no other one is ever called so."""
    return f"{_PREFIX}-{os.getpid()}-{process_start(os.getpid())}"


def _bucket(bits: float) -> list[str]:
    """A token bucket: a millisecond's tokens, at least 32 KiB; a queue of 10 ms, at least 256 KiB."""
    burst, limit = max(2**15, bits / 8 * 1e-3), max(2**18, bits / 8 * 1e-2)
    return ["tbf", "rate", f"{bits:.0f}bit", "burst", f"{burst:.0f}", "limit", f"{limit:.0f}"]


def _inside(name: str, command: Sequence[str]) -> list[str]:
    return ["ip", "netns", "exec", name, *command]


def pids_in(name: str) -> list[int]:
    """Processes that run in a namespace; none where it is not there."""
    done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    return [int(pid) for pid in done.stdout.split()]


def _remove(name: str) -> None:
    """End what runs in the namespace, then remove it; nothing where there is none."""
    until = time.monotonic() + _STOP_S
    while (pids := pids_in(name)) and time.monotonic() < until:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _do(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuleError(
            rule="the commands of iproute2 must succeed",
            value=f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}",
            remedy="Run as root, with iproute2 and the kernel's veth and tbf.",
        )
    return done.stdout
