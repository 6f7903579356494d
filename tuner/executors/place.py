"""Where a rank stands in its gang."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """What a rank is told before it joins its group.

    Attributes:
        local_rank, local_world_size: among the gang's ranks on the same node; on CUDA also the card, among
            those that the gang sees.
        store: file that all ranks of one machine meet at. Without it rank 0 opens a TCP store at ``address``
            and says its port; the others are told where it is.
        log: file for what it prints; without it, it prints where it was started to.
    """

    rank: int
    world_size: int
    device: str
    threads: int
    local_rank: int
    local_world_size: int
    store: str | None = None
    log: str | None = None
    address: str | None = None
