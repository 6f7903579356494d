"""Whether offloading boundaries lowers the peak at all, and by how much.

Freeing boundaries helps only where boundaries are alive. If the peak is the optimizer's step, or the forward of an
early block whose wide intermediates tower over everything, the peak stays and only the link is kept busy: "no
gain here". The figures come from a run (or a model) that keeps every boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from operators.errors import RuleError

PhaseKind = Literal["forward", "head", "backward", "other"]


@dataclass(frozen=True, slots=True)
class Phase:
    """The peak of one phase of a step that keeps all boundaries.

    ``block`` is the position of the checkpointed block (0-based) whose forward or backward this is; it is not
    looked at for ``head`` (all boundaries alive) and ``other`` (none alive: the optimizer).
    """

    kind: PhaseKind
    peak_bytes: int
    block: int = 0

    def freed(self, offloaded: int) -> int:
        """How many boundaries fewer are on the device in this phase when the first ``offloaded`` are away."""
        if self.kind == "other":
            return 0
        if self.kind == "head":
            return offloaded
        alive_away = min(self.block + 1, offloaded)
        own = int(self.block < offloaded)  # the input of the block that runs is on the device
        if self.kind == "forward":
            return alive_away - own
        before = int(0 < self.block <= offloaded)  # on its way back
        return alive_away - own - before


@dataclass(frozen=True, slots=True)
class Gain:
    """The peak with every boundary kept, and with the first ``offloaded`` on the host."""

    before_bytes: int
    after_bytes: int
    binding_before: Phase
    binding_after: Phase

    @property
    def gain_bytes(self) -> int:
        return self.before_bytes - self.after_bytes

    def __str__(self) -> str:
        after = self.binding_after
        where = (
            f"{after.kind} of block {after.block}" if after.kind in ("forward", "backward") else after.kind
        )
        if self.gain_bytes == 0:
            return f"no gain here: the peak ({self.before_bytes} bytes) is in {where}, where nothing is freed"
        return f"the peak falls by {self.gain_bytes} bytes to {self.after_bytes}; then {where} binds"


def offload_gain(phases: Sequence[Phase], *, boundary_bytes: int, boundaries: int, offloaded: int) -> Gain:
    """The fall of the peak, phase by phase.

    Args:
        phases: every phase that may hold the peak.
        boundary_bytes: N·H·b of one boundary.
        boundaries: L_b, boundaries of one forward.
        offloaded: |S|, how many of them go to the host (the first ones; the last one stays).

    Raises:
        RuleError: no phase, or ``offloaded`` is not within ``[0, boundaries)``.
    """
    if not phases:
        raise RuleError(rule="a gain needs at least one phase", value=0, remedy="Pass the phases of a step.")
    if not 0 <= offloaded <= max(0, boundaries - 1):
        raise RuleError(
            rule=f"of {boundaries} boundaries the last one stays", value=offloaded, remedy="Offload fewer."
        )
    before = max(phases, key=lambda phase: phase.peak_bytes)

    def after_bytes(phase: Phase) -> int:
        return phase.peak_bytes - phase.freed(offloaded) * boundary_bytes

    after = max(phases, key=after_bytes)
    return Gain(before.peak_bytes, after_bytes(after), before, after)


def expected_gain_bytes(
    phases: Sequence[Phase], *, boundary_bytes: int, boundaries: int, offloaded: int
) -> int:
    """Bytes by which the device peak falls; 0 says "no gain here". See :func:`offload_gain`."""
    return offload_gain(
        phases, boundary_bytes=boundary_bytes, boundaries=boundaries, offloaded=offloaded
    ).gain_bytes
