"""What checkpoint boundaries take on the device and on the host (Eq. 6: boundaries; SCO).

L_b boundaries of N·H·b bytes; SCO moves the first |S| of them to page-locked host memory.
"""

from __future__ import annotations

_PAGE = 4096


def boundary_bytes(*, tokens: int, hidden: int, scalar_bytes: int = 2) -> int:
    """N·H·b: the input of one checkpointed block."""
    return tokens * hidden * scalar_bytes


def locked_bytes(*, boundary_bytes: int, offloaded: int) -> int:
    """Host bytes locked by ``offloaded`` boundaries: a slab has no rounding beyond the page."""
    pages = (boundary_bytes + _PAGE - 1) // _PAGE
    return offloaded * pages * _PAGE


def offloaded_count(*, boundary_bytes: int, boundaries: int, host_budget_bytes: int) -> int:
    """|S|, the boundaries a budget of locked bytes holds. The last boundary is never among them: backward
    begins with its block."""
    one = locked_bytes(boundary_bytes=boundary_bytes, offloaded=1)
    if one == 0:
        return 0
    return max(0, min(host_budget_bytes // one, boundaries - 1))


def checkpoint_offload_terms(
    *, tokens: int, hidden: int, boundaries: int, offloaded: int, scalar_bytes: int = 2
) -> dict[str, int]:
    """Bytes on the device: at most two restored boundaries, and all that were not offloaded."""
    size = boundary_bytes(tokens=tokens, hidden=hidden, scalar_bytes=scalar_bytes)
    return {
        "boundaries_restored": size * min(2, offloaded),
        "boundaries_resident": size * (boundaries - offloaded),
    }
