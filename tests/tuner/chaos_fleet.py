"""The processes of a chaos test: workers, a controller and the API, started again whenever they end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from db.ids import new_id
from tests.ray_cluster import agents

MARK = "FLATPEAK_CHAOS"
# Who needs the database to start may end by itself while it is away.
_SHAKEN_S = 60.0


class Fleet:
    """Two workers, the controller that makes and drives the sweep (and works too), and the HTTP API.

    Args:
        where: ``local``, or the address of a Ray cluster.
        sweep_file: what the controller makes its sweep from.
        scratch: folder for their temporary files.
    """

    def __init__(self, url: str, where: str, sweep_file: Path, scratch: Path) -> None:
        self.mark = new_id("chaos")
        self.address = f"http://127.0.0.1:{(port := _free_port())}"
        script = [sys.executable, "-m", "tests.tuner.chaos_worker", url, where]
        serve = [sys.executable, "-m", "api.cli", "serve", "--database", url, "--port", str(port)]
        self._commands = {
            "controller": [*script, str(sweep_file)],
            "worker a": script,
            "worker b": script,
            "api": serve,
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._where = where
        self._environment = {**os.environ, MARK: self.mark, "TMPDIR": str(scratch)}
        self._shaken = float("-inf")

    def tend(self) -> None:
        """Start who is missing, as a service manager would."""
        for name, command in self._commands.items():
            process = self._processes.get(name)
            if process is not None and (code := process.poll()) is not None:
                fine = code in (0, -signal.SIGKILL) or time.monotonic() - self._shaken < _SHAKEN_S
                assert fine, f"{name} ended by itself with {code}"
                process = None
            if process is None:
                self._processes[name] = subprocess.Popen(
                    command, env=self._environment, stdout=subprocess.DEVNULL
                )

    def shaken(self) -> None:
        """The database was away just now."""
        self._shaken = time.monotonic()

    def victims(self, kind: str) -> list[psutil.Process]:
        """Living processes of a kind: ``controller``, ``worker``, ``api`` or ``rank``."""
        living = {n: psutil.Process(p.pid) for n, p in self._processes.items() if p.poll() is None}
        if kind == "rank":
            owners = list(living.values()) if self._where == "local" else agents()
            return [rank for owner in owners for rank in _ranks_of(owner)]
        return [process for name, process in living.items() if name.startswith(kind)]

    def end(self) -> list[int | None]:
        """Ask everybody to leave; their exit codes."""
        for process in self._processes.values():
            process.terminate()
        return [process.wait(timeout=60) for process in self._processes.values()]

    def kill(self) -> None:
        """End whoever is left."""
        for process in self._processes.values():
            process.kill()
            process.wait()

    def left(self) -> list[psutil.Process]:
        """Whoever still carries this fleet's mark."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark:
                    found.append(process)
            except psutil.Error:
                continue
        return found


@dataclass
class Follower:
    """A client that follows a sweep's events through every death of the API, by Last-Event-ID."""

    address: str
    sweep_id: str
    heard: list[int] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    _leave: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True, name="follower")
        self._thread.start()

    def leave(self) -> None:
        self._leave.set()
        self._thread.join(timeout=30)

    def _run(self) -> None:
        while not self._leave.is_set() and not self.ended.is_set():
            try:
                self._follow()
            except httpx.HTTPError:
                self._leave.wait(0.2)

    def _follow(self) -> None:
        headers = {"Last-Event-ID": str(self.heard[-1])} if self.heard else {}
        url = f"{self.address}/v1/sweeps/{self.sweep_id}/events"
        number = 0
        with httpx.stream("GET", url, headers=headers, timeout=20) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if self._leave.is_set():
                    return
                name, _, value = line.partition(": ")
                if name == "id":
                    number = int(value)
                elif name == "event" and value == "end":
                    self.ended.set()
                    return
                elif name == "data":
                    self.heard.append(number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _ranks_of(owner: psutil.Process) -> list[psutil.Process]:
    """Children of the owner's fork server."""
    try:
        return [rank for child in owner.children() for rank in child.children()]
    except psutil.Error:
        return []
