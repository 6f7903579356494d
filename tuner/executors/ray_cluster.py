"""The connection to a Ray cluster: with a token, without Ray's handlers and noise, and what its nodes hold."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_model.errors import RuleError

_KNOCK_S = 10.0
_TOKEN_FILE = Path("~/.ray/auth_token")
_CONNECT_REMEDY = (
    "Start it with `ray start --head` (RAY_AUTH_MODE=token and the same token on every node), or leave the "
    "address out for a cluster of this machine alone."
)


@dataclass(frozen=True, slots=True)
class Node:
    """One living node and what it has in all, whoever uses it now."""

    id: str
    cpus: float
    gpus: float

    def room(self, device: str, cpus_per_rank: float) -> int:
        """Ranks that fit on it when nobody else is there."""
        by_cpu = int(self.cpus / cpus_per_rank + 1e-9) if cpus_per_rank > 0 else 2**31
        return min(by_cpu, int(self.gpus)) if device == "cuda" else by_cpu


def load_ray() -> Any:
    """The Ray package.

    Raises:
        RuleError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise RuleError(
            rule="the executor ray needs the package ray",
            value=str(error),
            remedy="Install it: pip install 'flatpeak[ray]', here and on every node.",
        ) from error
    return ray


def connect(address: str | None) -> bool:
    """Connect this process, unless it is connected already.

    Args:
        address: ``host:port``, ``auto`` (the cluster of this node) or ``ray://host:port`` (Ray Client; needs
            ``ray[client]``); None starts a cluster of this machine that ends with this process.

    Returns:
        Whether this call connected, and so whoever made it disconnects.

    Raises:
        RuleError: no Ray, no token, or no cluster at the address.
    """
    authenticate(os.environ, local=address is None)
    if address is not None:
        _knock(address)
    ray = load_ray()
    if ray.is_initialized():
        return False
    options: dict[str, object] = {"log_to_driver": False, "configure_logging": False}
    if address is None:
        options |= {"include_dashboard": False, "object_store_memory": 80 * 2**20}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        ray.init(address=address, **options)
    except ImportError as error:
        raise RuleError(
            rule="a ray:// address needs Ray Client",
            value=address,
            remedy="Install ray[client], or start this command on a node of the cluster with --ray-address auto.",
        ) from error
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise RuleError(
            rule="a Ray cluster must answer at the address, and know our token",
            value=f"{address}: {str(error).strip().splitlines()[0]}",
            remedy=_CONNECT_REMEDY,
        ) from error
    finally:
        # Ray makes SIGTERM end the process at once; who waits for it to leave in order set a handler before
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return True


def _knock(address: str) -> None:
    """Ray tries an address that nobody listens at for minutes; a closed port says so at once."""
    named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    host, _, port = named.rpartition("://")[2].rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()
    except OSError as error:
        raise RuleError(
            rule="a Ray cluster must answer at the address",
            value=f"{named}: {error}",
            remedy=_CONNECT_REMEDY,
        ) from error


def authenticate(environment: dict[str, str] | os._Environ[str], *, local: bool) -> None:
    """Have Ray ask for a token, unless the environment says otherwise; before Ray is first imported.

    A cluster of this machine alone gets a fresh token, which its processes inherit and nobody else sees.

    Raises:
        RuleError: the cluster is another's and there is no token.
    """
    environment.setdefault("RAY_AUTH_MODE", "token")
    environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if environment["RAY_AUTH_MODE"] != "token" or _has_token(environment):
        return
    if not local:
        raise RuleError(
            rule="a Ray cluster is talked to with its token",
            value="neither RAY_AUTH_TOKEN nor RAY_AUTH_TOKEN_PATH nor ~/.ray/auth_token",
            remedy="Set RAY_AUTH_TOKEN_PATH to the cluster's token file; RAY_AUTH_MODE=disabled if it has none.",
        )
    environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _has_token(environment: Mapping[str, str]) -> bool:
    named = environment.get("RAY_AUTH_TOKEN") or environment.get("RAY_AUTH_TOKEN_PATH")
    return bool(named) or _TOKEN_FILE.expanduser().exists()


def living_nodes() -> list[Node]:
    """The cluster's nodes, in a fixed order."""
    import ray

    found = [
        Node(node["NodeID"], node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0))
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: node.id)
