"""Merging the operators' fronts under the two budgets: the exact optimum of the model for one layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cost_model.memory_types import FITS_HBM_SHARE, HOST_RAM_SHARE, VerdictName
from tuner.planner_fronts import Floats, Front

Tables = tuple[Floats, Floats, Floats]
"""(seconds, F, host bytes) over [dispatch, head, optimizer, boundaries]."""
_TIE = 1e-9
"""Seconds that count as equal: below what any of this resolves, above rounding noise."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """What one rank's card and one node's memory allow."""

    hbm_bytes: float
    ram_bytes: float
    outside_bytes: float
    slack_fraction: float
    ranks_per_node: int
    ranks_live_in_ram: bool
    """CPU ranks: their own memory is the node's memory."""

    def footprint(self, phase_peak: Floats) -> Floats:
        """F = phase peak + outside the allocator + slack."""
        return phase_peak * (1.0 + self.slack_fraction) + self.outside_bytes

    def host(self, locked: Floats, footprint: Floats) -> Floats:
        """Bytes of a node."""
        return locked + self.ranks_per_node * footprint if self.ranks_live_in_ram else locked


@dataclass(frozen=True, slots=True)
class LayoutCase:
    """One layout's options and the time of what no knob changes.

    Attributes:
        origin: bytes per phase and host bytes of the base launch, degrees included.
        block_s: seconds a step spends in MoE segments and exposed collectives, per dispatch option.
        exposed_s: [dispatch option, boundary option] seconds a step of exposed boundary copies.
        head_s, optimizer_s: seconds a step, per option.
        fixed_s: attention, reductions.
    """

    order: tuple[int, ...]
    base: dict[str, Any]
    origin: tuple[Floats, float]
    dispatch: Front
    head: Front
    optimizer: Front
    boundaries: Front
    block_s: Floats
    exposed_s: Floats
    head_s: Floats
    optimizer_s: Floats
    fixed_s: float

    @property
    def fastest_s(self) -> float:
        """No choice of this layout is faster."""
        exposed = self.block_s + self.exposed_s.min(axis=1)
        return float(exposed.min() + self.head_s.min() + self.optimizer_s.min() + self.fixed_s)


@dataclass(frozen=True, slots=True)
class Choice:
    """The best launch of one layout for one verdict."""

    verdict: VerdictName
    seconds: float
    footprint_bytes: float
    host_bytes: float
    order: tuple[int, ...]
    knobs: dict[str, Any] = field(compare=False)

    @property
    def rank(self) -> tuple[Any, ...]:
        """What choices are sorted by: verdict, seconds, host bytes, device bytes, layout (never by chance)."""
        place = ("fits", "at_risk", "does_not_fit").index(self.verdict)
        if place == 2:
            return (place, self.footprint_bytes, self.host_bytes, self.order)
        return (place, round(self.seconds / _TIE), self.host_bytes, self.footprint_bytes, self.order)


def _axis(values: Floats, axis: int) -> Floats:
    shape = [1, 1, 1, 1]
    shape[axis] = len(values)
    return values.reshape(shape)


def footprints(case: LayoutCase, budgets: Budgets) -> tuple[Floats, Floats]:
    """(F, host bytes) over [dispatch, head, optimizer, boundaries]."""
    fronts = (case.dispatch, case.head, case.optimizer, case.boundaries)
    peak: Floats = np.zeros(tuple(len(f) for f in fronts))
    for phase, start in enumerate(case.origin[0]):
        if start <= 0:
            continue
        live: Floats = np.full((1, 1, 1, 1), start)
        for axis, front in enumerate(fronts):
            column = front.phases[:, phase]
            # A phase that an operator leaves alone keeps a length of 1 along its axis.
            live = live + (_axis(column, axis) if np.any(column != column[0]) else column[0])
        np.maximum(peak, live, out=peak)
    footprint = budgets.footprint(peak)
    locked: Floats = np.full((1, 1, 1, 1), case.origin[1])
    for axis, front in enumerate(fronts):
        locked = locked + _axis(front.host, axis)
    return footprint, budgets.host(locked, footprint)


def best_choices(case: LayoutCase, budgets: Budgets) -> list[Choice]:
    """The best launch of this layout: of those that fit; else of those at risk; else the one nearest to fitting."""
    footprint, host = footprints(case, budgets)
    host = np.broadcast_to(host, footprint.shape)
    seconds = (
        case.block_s[:, None, None, None]
        + case.exposed_s[:, None, None, :]
        + _axis(case.head_s, 1)
        + _axis(case.optimizer_s, 2)
        + case.fixed_s
    )
    tables = (seconds, footprint, host)
    fits = (footprint <= FITS_HBM_SHARE * budgets.hbm_bytes) & (host <= HOST_RAM_SHARE * budgets.ram_bytes)
    if fits.any():
        return [_pick(case, "fits", tables, fits)]
    risk = (footprint <= budgets.hbm_bytes) & (host <= budgets.ram_bytes)
    if risk.any():
        return [_pick(case, "at_risk", tables, risk)]
    over = np.maximum(footprint / budgets.hbm_bytes, host / budgets.ram_bytes)
    index = np.unravel_index(int(np.argmin(over)), over.shape)
    return [_choice(case, "does_not_fit", index, tables)]


def _pick(case: LayoutCase, verdict: VerdictName, tables: Tables, allowed: Any) -> Choice:
    seconds, footprint, host = tables
    best = float(seconds[allowed].min())
    tied = np.argwhere(allowed & (seconds <= best + _TIE))
    keys = [(float(host[tuple(i)]), float(footprint[tuple(i)]), tuple(int(part) for part in i)) for i in tied]
    index = min(keys)[2]
    return _choice(case, verdict, index, tables)


def _choice(case: LayoutCase, verdict: VerdictName, index: Any, tables: Tables) -> Choice:
    d, h, o, n = (int(part) for part in index)
    knobs = {
        **case.base,
        **case.dispatch.knobs[d],
        **case.head.knobs[h],
        **case.optimizer.knobs[o],
        **case.boundaries.knobs[n],
    }
    place = (d, h, o, n)
    seconds, footprint, host = tables
    return Choice(
        verdict, float(seconds[place]), float(footprint[place]), float(host[place]), case.order, knobs
    )
