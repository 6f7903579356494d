"""The network between nodes as a name: what tells measurements over one from those over another."""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil

from cost_model.errors import RuleError

VARIABLE = "FLATPEAK_NETWORK"
"""Names the network of a node whose interface does not say what it is, or says it wrongly."""
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_CLASS = Path("/sys/class")


def network_name(address: str, device: str, *, classes: Path = _CLASS) -> str | None:
    """The class of network that this node reaches others by: ``ethernet-10g``, ``rdma-8x400g``, or a stated name.

    Ranks on the CPU talk over the interface that holds ``address``; cards over the node's active RDMA ports, and
    over that interface where there are none. Only a physical or bonded interface is believed: a virtual one
    (veth, virtio, a pod's) states a speed that means nothing, or none.

    Args:
        address: by which the cluster knows this node.
        device: ``cpu`` or ``cuda``.
        classes: where the kernel lists devices.

    Returns:
        ``$FLATPEAK_NETWORK`` where it is set; None where nobody can say.

    Raises:
        RuleError: the stated name is not one.
    """
    if stated := os.environ.get(VARIABLE):
        if _NAME.fullmatch(stated):
            return stated
        raise RuleError(
            rule=f"{VARIABLE} is a name of up to 64 lower-case letters, digits, dots, dashes and underscores",
            value=stated,
            remedy="Name the class of network, the same on every node: ethernet-25g, efa-3200g.",
        )
    if device == "cuda" and (ports := _rdma_ports(classes)):
        rates = sorted(set(ports))
        return "rdma-" + "-".join(f"{ports.count(rate)}x{rate}g" for rate in rates)
    speed = _interface_mbit(address, classes)
    if speed is None:
        return None
    return f"ethernet-{speed // 1000}g" if speed % 1000 == 0 else f"ethernet-{speed}m"


def _rdma_ports(classes: Path) -> list[int]:
    """Gbit/s of every active port of an RDMA device."""
    found: list[int] = []
    for port in sorted(classes.glob("infiniband/*/ports/*")):
        rate = re.match(r"(\d+)", _text(port / "rate"))
        if "ACTIVE" in _text(port / "state") and rate:
            found.append(int(rate.group(1)))
    return found


def _interface_mbit(address: str, classes: Path) -> int | None:
    for name, addresses in psutil.net_if_addrs().items():
        if not any(one.address == address for one in addresses):
            continue
        interface = classes / "net" / name
        if not any((interface / kind).exists() for kind in ("device", "bonding")):
            return None
        text = _text(interface / "speed")
        return int(text) if text.isdigit() and int(text) > 0 else None
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # the speed of an interface that is down cannot be read
        return ""
