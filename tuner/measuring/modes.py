"""Latency is bimodal: a fast and a slow mode, set by the host's launch pattern. They are never averaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, median, stdev

from cost_model import samples
from cost_model.errors import RuleError


@dataclass(frozen=True, slots=True)
class Modes:
    """Medians of the two modes in seconds, and the share of repeats in the slow one (0 when there is none)."""

    fast_s: float
    slow_s: float | None
    slow_share: float
    noise: float = 0.0
    """Relative standard deviation of the fast mode's median, as far as its repeats show it."""


def split_modes(seconds: Sequence[float]) -> Modes:
    """The modes as the cost model tells them apart (:func:`cost_model.samples.split_modes`), in figures.

    Raises:
        RuleError: no repeats, or a time that is not positive.
    """
    if not seconds or not min(seconds) > 0:
        raise RuleError(
            rule="modes are told apart in at least one positive time",
            value=list(seconds),
            remedy="Measure again.",
        )
    fast, slow = samples.split_modes(seconds)
    noise = stdev(fast) / fmean(fast) / sqrt(len(fast)) if len(fast) > 1 else 0.0
    return Modes(median(fast), median(slow) if slow else None, len(slow) / (len(fast) + len(slow)), noise)
