"""The least-loaded planner of LLEP: which rank computes which rows of which expert.

Standard library only: a planner runs it without torch, and every rank of a job runs it on the same gathered
loads and must arrive at the same plan (no randomness, no floating point beyond the two thresholds, ties by
lowest number).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from operators.errors import RuleError


class Interval(NamedTuple):
    """Rows ``[start, end)`` of an expert's global token list go to ``rank``."""

    rank: int
    start: int
    end: int


@dataclass(frozen=True)
class LeastLoadedPlan:
    """Where every row goes.

    ``intervals[e]`` cuts ``[0, loads[e])``, expert e's global token list (rank order, then local order), into
    consecutive pieces; it is empty when the expert has no rows. ``spread`` is False when the loads were even
    enough for plain expert parallelism (every row on its native rank).
    """

    intervals: tuple[tuple[Interval, ...], ...]
    ranks: int
    spread: bool

    def native(self, expert: int) -> int:
        """The rank that owns ``expert``: consecutive blocks of experts, rank by rank."""
        return expert * self.ranks // len(self.intervals)

    def guests(self, rank: int) -> tuple[int, ...]:
        """Experts ``rank`` computes for others, in rising order."""
        if not self.spread:
            return ()
        return tuple(
            e
            for e, pieces in enumerate(self.intervals)
            if self.native(e) != rank and any(piece.rank == rank for piece in pieces)
        )

    def rank_rows(self) -> tuple[int, ...]:
        """Rows each rank computes."""
        rows = [0] * self.ranks
        for pieces in self.intervals:
            for rank, start, end in pieces:
                rows[rank] += end - start
        return tuple(rows)


def imbalance(loads: Sequence[int], ranks: int) -> float:
    """Largest over mean native rank load (1.0 without any rows)."""
    total = sum(loads)
    if total == 0:
        return 1.0
    local = len(loads) // ranks
    return max(sum(loads[r * local : (r + 1) * local]) for r in range(ranks)) * ranks / total


def plan_least_loaded(
    loads: Sequence[int], ranks: int, *, alpha: float = 1.0, min_rows: int = 1024, switch: float = 1.3
) -> LeastLoadedPlan:
    """Plan one layer.

    Experts are visited by falling load. Each keeps rows on its native rank up to the room there (capacity
    ``⌊alpha·total/ranks⌋``, less what is assigned and what other native experts will still bring); the rest
    goes to the least-loaded ranks in pieces of at least ``min_rows`` rows, the last piece excepted. When no
    rank has room for such a piece, all that remains is forced onto the least-loaded other rank.

    Args:
        loads: ``[E]`` rows of every expert over the whole group; E is a multiple of ``ranks``.
        ranks: E_p.
        alpha: Capacity factor, at least 1.
        min_rows: m, the fewest rows worth a matmul on a guest.
        switch: λ; below this max/mean native rank load plain expert parallelism is kept.

    Raises:
        RuleError: E is not a multiple of ``ranks``, a load is negative, or a knob is out of range.
    """
    _check(loads, ranks, alpha, min_rows)
    experts, total = len(loads), sum(loads)
    local = experts // ranks
    if ranks == 1 or total == 0 or imbalance(loads, ranks) < switch:
        native_only = tuple((Interval(e // local, 0, n),) if n else () for e, n in enumerate(loads))
        return LeastLoadedPlan(native_only, ranks, spread=False)

    capacity = int(alpha * total / ranks)
    # Assigned plus pending native rows. Keeping an expert at home moves rows from one to the other, so only
    # rows that leave change this.
    load = [sum(loads[r * local : (r + 1) * local]) for r in range(ranks)]
    intervals: list[tuple[Interval, ...]] = [()] * experts
    full = sum(loads) + 1
    for expert in sorted(range(experts), key=lambda e: (-loads[e], e)):
        rows = loads[expert]
        if rows == 0:
            break
        home = expert // local
        at_home = min(rows, max(0, capacity - load[home] + rows))
        if at_home == rows:
            intervals[expert] = (Interval(home, 0, rows),)
            continue
        pieces = [Interval(home, 0, at_home)] if at_home else []
        start = at_home
        home_load, load[home] = load[home] - (rows - at_home), full  # the native rank is no candidate
        while start < rows:
            lowest = min(load)
            rank = load.index(lowest)
            left = rows - start
            taken = min(left, capacity - lowest)
            if taken < min(min_rows, left):
                taken = left
            pieces.append(Interval(rank, start, start + taken))
            load[rank] += taken
            start += taken
        load[home] = home_load
        intervals[expert] = tuple(_merged(pieces))
    return LeastLoadedPlan(tuple(intervals), ranks, spread=True)


def _merged(pieces: list[Interval]) -> list[Interval]:
    """Neighbouring pieces of one rank become one (a forced rest may follow a piece on the same rank)."""
    merged: list[Interval] = []
    for piece in pieces:
        if merged and merged[-1].rank == piece.rank:
            merged[-1] = Interval(piece.rank, merged[-1].start, piece.end)
        else:
            merged.append(piece)
    return merged


def _check(loads: Sequence[int], ranks: int, alpha: float, min_rows: int) -> None:
    if ranks < 1 or not loads or len(loads) % ranks:
        raise RuleError(
            rule="the number of experts is a positive multiple of the ranks that share them",
            value=(len(loads), ranks),
            remedy="Choose expert_degree among the divisors of the expert count.",
        )
    if min(loads) < 0:
        raise RuleError(
            rule="an expert's load is a count of rows", value=min(loads), remedy="Pass counts of at least 0."
        )
    if alpha < 1.0 or min_rows < 1:
        raise RuleError(
            rule="alpha >= 1 and min_rows >= 1",
            value=(alpha, min_rows),
            remedy="alpha = 1 is the tightest capacity that can hold all rows; min_rows counts rows.",
        )
