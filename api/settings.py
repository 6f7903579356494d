"""How the server is set up."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one server process. ``tokens_required`` follows from the address it is bound to."""

    database_url: str | None = None
    tokens_required: bool = False
    max_body_bytes: int = 1_000_000
    max_streams: int = 64
    """Event streams served at once."""
    max_planning: int = 8
    """Plan requests computed or waiting at once; planning is one core's work."""
    event_poll_s: float = 0.5
    loopback_hosts_only: bool = True
    """Without tokens, a request must name a loopback host: a page elsewhere cannot reach in by DNS rebinding."""


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
