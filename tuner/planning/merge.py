"""Merging the operators' fronts under the two budgets: the exact optimum of the model for one layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cost_model.memory_types import FITS_HBM_SHARE, HOST_RAM_SHARE, VerdictName
from tuner.planning.fronts import Floats, Front

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


@dataclass(frozen=True, slots=True)
class _Peaks:
    """Largest phases, by which knobs move them. No phase is moved by dispatch and head both, so the constraints of
    the two are independent once the optimizer's (O) and the boundaries' (N) options are chosen.
    """

    shared_on: Floats
    dispatch_aon: Floats
    head_hon: Floats
    locked_on: Floats

    @staticmethod
    def of(case: LayoutCase) -> _Peaks:
        dispatch, head = case.dispatch, case.head
        optimizer, boundaries = case.optimizer, case.boundaries
        both = (len(optimizer), len(boundaries))
        shared: Floats = np.zeros(both)
        by_dispatch: Floats = np.zeros((len(dispatch), *both))
        by_head: Floats = np.zeros((len(head), *both))
        for phase, start in enumerate(case.origin[0]):
            if start <= 0:
                continue
            a, h = dispatch.phases[:, phase], head.phases[:, phase]
            live = start + optimizer.phases[:, phase, None] + boundaries.phases[None, :, phase]
            moved_a, moved_h = bool(np.any(a != a[0])), bool(np.any(h != h[0]))
            if moved_a and moved_h:
                raise ArithmeticError(
                    "one phase holds live sets of dispatch and head: their fronts do not separate"
                )
            if moved_a:
                np.maximum(by_dispatch, live + h[0] + a[:, None, None], out=by_dispatch)
            elif moved_h:
                np.maximum(by_head, live + a[0] + h[:, None, None], out=by_head)
            else:
                np.maximum(shared, live + a[0] + h[0], out=shared)
        locked = case.origin[1] + optimizer.host[:, None] + boundaries.host[None, :]
        return _Peaks(shared, by_dispatch, by_head, locked)

    def at(self, d: int, h: int, o: int, n: int) -> float:
        """The phase peak of one launch."""
        return float(max(self.shared_on[o, n], self.dispatch_aon[d, o, n], self.head_hon[h, o, n]))


def best_choice(case: LayoutCase, budgets: Budgets) -> Choice:
    """The best launch of this layout: of those that fit; else of those at risk; else the one nearest to fitting."""
    peaks = _Peaks.of(case)
    for verdict, hbm, ram in (
        ("fits", FITS_HBM_SHARE * budgets.hbm_bytes, HOST_RAM_SHARE * budgets.ram_bytes),
        ("at_risk", budgets.hbm_bytes, budgets.ram_bytes),
    ):
        place = _fastest(case, peaks, budgets, hbm, ram)
        if place is not None:
            return _choice(case, verdict, place, peaks=peaks, budgets=budgets)  # type: ignore[arg-type]
    return _choice(case, "does_not_fit", _nearest(peaks, budgets), peaks=peaks, budgets=budgets)


Place = tuple[int, int, int, int]


def _fastest(case: LayoutCase, peaks: _Peaks, budgets: Budgets, hbm: float, ram: float) -> Place | None:
    def allowed(peak: Floats) -> Any:
        footprint = budgets.footprint(peak)
        return (footprint <= hbm) & (budgets.host(peaks.locked_on, footprint) <= ram)

    by_dispatch = np.where(
        allowed(peaks.dispatch_aon), (case.block_s[:, None] + case.exposed_s)[:, None, :], np.inf
    )
    by_head = np.where(allowed(peaks.head_hon), case.head_s[:, None, None], np.inf)
    total = by_dispatch.min(axis=0) + by_head.min(axis=0) + case.optimizer_s[:, None] + case.fixed_s
    total = np.where(allowed(peaks.shared_on), total, np.inf)
    best = float(total.min())
    if not np.isfinite(best):
        return None
    candidates: list[tuple[float, float, Place]] = []
    for o, n in np.argwhere(total <= best + _TIE):
        d = _frugal(by_dispatch[:, o, n], peaks.dispatch_aon[:, o, n])
        h = _frugal(by_head[:, o, n], peaks.head_hon[:, o, n])
        place = (d, h, int(o), int(n))
        footprint = budgets.footprint(np.asarray(peaks.at(*place)))
        host = budgets.host(np.asarray(peaks.locked_on[o, n]), footprint)
        candidates.append((float(host), float(footprint), place))
    return min(candidates)[2]


def _frugal(seconds: Floats, nbytes: Floats) -> int:
    """Of the options as fast as the fastest, the one with the fewest bytes; the first of these."""
    tied = np.flatnonzero(seconds <= seconds.min() + _TIE)
    return int(tied[np.argmin(nbytes[tied])])


def _nearest(peaks: _Peaks, budgets: Budgets) -> Place:
    def over(peak: Floats) -> Floats:
        footprint = budgets.footprint(peak)
        host = budgets.host(peaks.locked_on, footprint)
        return np.maximum(footprint / budgets.hbm_bytes, host / budgets.ram_bytes)

    by_dispatch, by_head = over(peaks.dispatch_aon), over(peaks.head_hon)
    worst = np.maximum(np.maximum(by_dispatch.min(axis=0), by_head.min(axis=0)), over(peaks.shared_on))
    o, n = np.unravel_index(int(np.argmin(worst)), worst.shape)
    return int(np.argmin(by_dispatch[:, o, n])), int(np.argmin(by_head[:, o, n])), int(o), int(n)


def _choice(
    case: LayoutCase, verdict: VerdictName, place: Place, *, peaks: _Peaks, budgets: Budgets
) -> Choice:
    d, h, o, n = place
    footprint = budgets.footprint(np.asarray(peaks.at(d, h, o, n)))
    host = budgets.host(np.asarray(peaks.locked_on[o, n]), footprint)
    seconds = case.block_s[d] + case.exposed_s[d, n] + case.head_s[h] + case.optimizer_s[o] + case.fixed_s
    knobs = {
        **case.base,
        **case.dispatch.knobs[d],
        **case.head.knobs[h],
        **case.optimizer.knobs[o],
        **case.boundaries.knobs[n],
    }
    return Choice(verdict, float(seconds), float(footprint), float(host), case.order, knobs)
