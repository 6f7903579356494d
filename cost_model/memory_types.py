"""What a memory prediction says: Eq. 6 term by term, the live set of every phase, and the host side.

All figures are whole bytes of one rank, except the host's, which are bytes of one node.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Mode = Literal["expected", "guarantee"]
VerdictName = Literal["fits", "at_risk", "does_not_fit"]

MODES: tuple[Mode, ...] = ("expected", "guarantee")

TERM_NAMES = (
    "weights_grads",
    "optimizer_staging",
    "attention",
    "dispatch",
    "strips",
    "boundaries_restored",
    "boundaries_resident",
    "zero_gather",
    "migrated_experts",
    "accumulators",
    "outside_allocator",
    "allocator_slack",
)
"""Names of Eq. 6's terms, everywhere and in this order."""

ALLOCATOR_TERMS = TERM_NAMES[:10]
"""The terms the device allocator sees; the other two lie outside it or between its blocks."""

PHASE_NAMES = (
    "forward_attention",
    "forward_moe",
    "forward_dense",
    "head",
    "backward_dense",
    "backward_moe",
    "backward_attention",
    "optimizer",
)
"""Phases of a training step; the two dense ones are there only for a model with dense layers."""

HOST_TERM_NAMES = ("optimizer_state", "boundaries", "base", "device_memory")
"""Names of the host's terms; the last only where ranks are CPU processes and their memory is the node's."""

FITS_HBM_SHARE = 0.95
"""A launch fits when its footprint leaves this much of the card's memory unused or less."""
HOST_RAM_SHARE = 0.9
"""Share of a node's memory that optimizer state, boundaries and processes may take together."""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Predicted memory of one launch in one mode."""

    mode: Mode
    terms: dict[str, int]
    """Eq. 6's terms of this mode under ``TERM_NAMES``; they add up to the closed form of the mode."""
    bound_bytes: int
    """Closed form in guarantee mode: holds for any router."""
    expected_bytes: int
    """Closed form in expected mode: for a router as unbalanced as the workload says."""
    phase_bytes: int
    """Largest phase of this mode, allocator terms only: what ``max_memory_allocated`` should show."""
    phases: dict[str, dict[str, int]]
    """Phase name to its live set under ``ALLOCATOR_TERMS``."""
    footprint_bytes: int
    """F: phase peak + what lies outside the allocator + allocator slack. The verdict rests on it."""
    hbm_bytes: int
    host_terms: dict[str, int]
    """Bytes of one node under ``HOST_TERM_NAMES``."""
    host_bytes_per_node: int
    host_limit_bytes: int
    """0.9 of the node's memory."""

    @property
    def verdict(self) -> VerdictName:
        """``fits``, ``at_risk`` or ``does_not_fit``."""
        ram = round(self.host_limit_bytes / HOST_RAM_SHARE)
        return verdict(self.footprint_bytes, self.hbm_bytes, self.host_bytes_per_node, ram)

    @property
    def binding_phases(self) -> list[tuple[str, int]]:
        """Phases with their bytes, largest first: the binding live set and its runners-up."""
        totals = ((name, sum(live.values())) for name, live in self.phases.items())
        return sorted(totals, key=lambda item: -item[1])

    def to_json(self) -> dict[str, Any]:
        """Plain figures, ready for JSON."""
        return {**asdict(self), "verdict": self.verdict}


def verdict(footprint_bytes: int, hbm_bytes: int, host_bytes: int, ram_bytes: int) -> VerdictName:
    """Whether a launch fits.

    Args:
        footprint_bytes: F of one rank.
        hbm_bytes: device memory of one rank.
        host_bytes: host use of one node.
        ram_bytes: memory of one node.

    Returns:
        ``fits`` when F is at most 0.95 of the device memory and the host use at most 0.9 of the node's;
        ``at_risk`` when both still are within the memory there is; ``does_not_fit`` otherwise.
    """
    if footprint_bytes > hbm_bytes or host_bytes > ram_bytes:
        return "does_not_fit"
    if footprint_bytes <= FITS_HBM_SHARE * hbm_bytes and host_bytes <= HOST_RAM_SHARE * ram_bytes:
        return "fits"
    return "at_risk"
