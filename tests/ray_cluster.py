"""A throwaway Ray cluster of two nodes on this machine, started on first use and stopped when Python ends.

Its nodes are real: each has a raylet and an object store of its own. Only the network between them is not.
"""

from __future__ import annotations

import atexit
import os
import secrets
from functools import cache
from typing import Any

import psutil

CPUS_PER_NODE = 2
_STORE_BYTES = 80 * 2**20
_NODE = {"num_cpus": CPUS_PER_NODE, "num_gpus": 0, "object_store_memory": _STORE_BYTES}


@cache
def cluster() -> Any:
    """The cluster; ``.address`` is where executors connect. It asks for a token, which this process now has."""
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        # a node that is gone is noticed within seconds, one that is only slow is not taken for it
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "5000",
    }
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={**_NODE, "include_dashboard": False})
    atexit.register(made.shutdown)
    made.add_node(**_NODE)
    return made


def lose_a_node() -> None:
    """Kill all processes of the node that is not the head, and start another one."""
    (other,) = (node for node in cluster().list_all_nodes() if node is not cluster().head_node)
    cluster().remove_node(other, allow_graceful=False)
    cluster().add_node(**_NODE)


def agents() -> list[psutil.Process]:
    """The actors that run in the cluster now."""
    nodes = cluster().list_all_nodes()
    daemons = [info.process.pid for node in nodes for infos in node.all_processes.values() for info in infos]
    found = {child.pid: child for pid in daemons for child in _children(pid)}
    return [process for process in found.values() if _name(process).startswith("ray::NodeAgent")]


def placement_groups() -> list[dict[str, Any]]:
    """Placement groups that are not removed; this process must be connected."""
    from ray.util import placement_group_table

    return [group for group in placement_group_table().values() if group["state"] != "REMOVED"]


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
