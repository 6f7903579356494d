"""Bytes of SCO, term by term: boundaries on the device, boundaries on the host (theory: Eq. 6, section SCO).

Torch-free. A boundary is a checkpointed block's input, N·H·b bytes; L_b boundaries, the first |S| on the host.
"""

from __future__ import annotations

PAGE_BYTES = 4096


def boundary_bytes(*, tokens: int, hidden: int, scalar_bytes: int = 2) -> int:
    """Bytes of one boundary, N·H·b."""
    return tokens * hidden * scalar_bytes


def locked_bytes(*, boundary_bytes: int, offloaded: int) -> int:
    """Host bytes that ``offloaded`` boundaries lock: each rounded up to the page, and nothing more."""
    return -(-boundary_bytes // PAGE_BYTES) * PAGE_BYTES * offloaded


def offloaded_count(*, boundary_bytes: int, boundaries: int, host_budget_bytes: int) -> int:
    """|S|: whole boundaries, in forward order, while they fit the budget of locked bytes. The last one stays."""
    if boundaries < 1 or boundary_bytes == 0:
        return 0
    return min(boundaries - 1, host_budget_bytes // locked_bytes(boundary_bytes=boundary_bytes, offloaded=1))


def checkpoint_offload_terms(
    *, tokens: int, hidden: int, boundaries: int, offloaded: int, scalar_bytes: int = 2
) -> dict[str, int]:
    """Device bytes of boundaries in backward.

    ``boundaries_restored``: at most two offloaded boundaries are back at a time, the one whose block recomputes
    and the one before it. ``boundaries_resident``: those never offloaded.
    """
    one = boundary_bytes(tokens=tokens, hidden=hidden, scalar_bytes=scalar_bytes)
    return {
        "boundaries_restored": min(2, offloaded) * one,
        "boundaries_resident": (boundaries - offloaded) * one,
    }
