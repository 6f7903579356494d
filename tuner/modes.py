"""Latency is bimodal: a fast and a slow mode, set by the host's launch pattern. They are never averaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import mean, median, stdev

from cost_model.errors import RuleError

# The slow mode lies 12 to 56 % above the fast one; less is noise within one mode.
_GAP = 1.12


@dataclass(frozen=True, slots=True)
class Modes:
    """Medians of the two modes in seconds, and the share of repeats in the slow one (0 when there is none)."""

    fast_s: float
    slow_s: float | None
    slow_share: float
    noise: float = 0.0
    """Relative standard deviation of the fast mode's median, as far as its repeats show it."""


def split_modes(seconds: Sequence[float]) -> Modes:
    """Cut the repeats at the widest relative gap, when it is wide enough to be a second mode.

    Raises:
        RuleError: no repeats, or a time that is not positive.
    """
    ordered = sorted(seconds)
    if not ordered or not ordered[0] > 0:
        raise RuleError(
            rule="modes are told apart in at least one positive time",
            value=list(seconds),
            remedy="Measure again.",
        )
    cut, widest = len(ordered), _GAP
    for i in range(1, len(ordered)):
        ratio = ordered[i] / ordered[i - 1]
        if ratio >= widest:
            cut, widest = i, ratio
    slow = ordered[cut:]
    fast = ordered[:cut]
    noise = stdev(fast) / mean(fast) / sqrt(len(fast)) if len(fast) > 1 else 0.0
    return Modes(median(fast), median(slow) if slow else None, len(slow) / len(ordered), noise)
