"""The front of latency and peak memory, and whether a point can still reach it after its first repeat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# The slow mode of a latency lies up to 56 % above the fast one (theory, section 2): a first repeat may be in it.
SLOWEST_MODE = 1.56

Point = tuple[int, float]
"""(peak bytes, seconds)."""


def front(points: Iterable[Point]) -> list[Point]:
    """The points that no other one beats in both, by rising peak."""
    kept: list[Point] = []
    for peak, seconds in sorted(points):
        if not kept or seconds < kept[-1][1]:
            kept.append((peak, seconds))
    return kept


def slack(ratios: Iterable[float]) -> float:
    """How far a first repeat may lie above its point's fast mode.

    Args:
        ratios: slowest repeat over the fast mode, of each measured point of the sweep.
    """
    return max([SLOWEST_MODE, *ratios])


def out_of_reach(first_s: float, peak_bytes: int, known: Sequence[Point], slack: float) -> Point | None:
    """The known point that needs no more memory and is faster than this one can be, or None.

    Args:
        first_s: seconds of the first repeat; the point's fast mode is at least ``first_s / slack``.
    """
    for peak, seconds in known:
        if peak <= peak_bytes and seconds < first_s / slack:
            return peak, seconds
    return None
