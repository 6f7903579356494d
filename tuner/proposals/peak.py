"""What a launch needs of memory where Eq. 6 does not rule: learned from the launches there were.

The logarithm of a point's peak is taken as

    log bound(x) + offset + slopes · knobs + deviation(x) + noise

where the bound is known, and without its first term where it is not. A measured peak is a row of it; a point that
ran out of memory says only that its peak lies above the limit, which is a censored row (expectation propagation
takes it in).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import log_ndtr, ndtr

from tuner.proposals.kernel import KnobKernel
from tuner.space import Config

Array = npt.NDArray[np.float64]

_NOISE_SD = 0.02
_REACH = 0.6
_SWEEPS = 8


@dataclass(frozen=True, slots=True)
class Needed:
    """Memory of a launched point.

    Attributes:
        peak_bytes: measured; None where it ran out of memory.
    """

    config: Config
    bound_bytes: int | None
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class _Prior:
    """Standard deviations of the terms, and the offset's mean (against the limit where no bound is known)."""

    offset: float
    offset_sd: float
    slope_sd: float
    deviation_sd: float


# Peaks lie somewhat below their bounds, by much the same ratio. Of knobs alone nobody knows which of them takes
# memory: over its whole range one may change it by a factor of seven, and whoever sets a limit expects to keep it.
_BOUNDED = _Prior(-0.2, 0.3, 0.1, 0.1)
_BLIND = _Prior(-0.5, 1.5, 2.0, 0.5)


def chances(
    kernel: KnobKernel,
    candidates: Sequence[tuple[Config, int | None]],
    needed: Sequence[Needed],
    limit_bytes: int,
) -> Array:
    """Probability of every candidate that its peak keeps the limit, [n].

    Args:
        candidates: configurations with their bounds. Bounds speak when all of them, and of ``needed``, are known.
    """
    limit = math.log(limit_bytes)
    bounds = [bound for _, bound in candidates] + [one.bound_bytes for one in needed]
    known = [bound for bound in bounds if bound]
    prior = _BOUNDED if len(known) == len(bounds) else _BLIND
    means = np.log(known) if prior is _BOUNDED else np.full(len(bounds), limit)
    means = means + prior.offset
    points: list[Mapping[str, Any]] = [config for config, _ in candidates]
    points += [one.config for one in needed]
    covariance = prior.offset_sd**2 + prior.deviation_sd**2 * kernel.matrix(points, _REACH)
    places = kernel.places(points)
    covariance += prior.slope_sd**2 * (places @ places.T)
    count = len(candidates)
    rows = np.arange(count, len(points))
    peaks = np.array([math.log(one.peak_bytes) if one.peak_bytes else math.nan for one in needed])
    precision, shift = _sites(covariance[np.ix_(rows, rows)], peaks - means[rows], limit - means[rows])
    root = np.sqrt(precision)
    gram = np.eye(len(rows)) + root[:, None] * covariance[np.ix_(rows, rows)] * root[None, :]
    across = root[:, None] * covariance[rows][:, :count]
    solved = np.linalg.solve(gram, across)
    # rows without precision say nothing: their shift is zero too
    pulled = np.divide(shift, root, out=np.zeros_like(shift), where=root > 0)
    mean = means[:count] + solved.T @ pulled
    variance = np.maximum(np.diag(covariance)[:count] - (across * solved).sum(axis=0), 1e-9)
    found: Array = ndtr((limit - mean) / np.sqrt(variance + _NOISE_SD**2))
    return found


def _sites(covariance: Array, peaks: Array, limits: Array) -> tuple[Array, Array]:
    """Gaussian stand-ins of the rows, centred: precisions and precision times mean, [m] each.

    Args:
        peaks: NaN where the row is censored at its limit.
    """
    censored = np.isnan(peaks)
    precision = np.where(censored, 0.0, 1.0 / _NOISE_SD**2)
    shift = np.where(censored, 0.0, np.nan_to_num(peaks) * precision)
    for _ in range(_SWEEPS if censored.any() else 0):
        for row in np.flatnonzero(censored):
            root = np.sqrt(precision)
            gram = np.eye(len(peaks)) + root[:, None] * covariance * root[None, :]
            posterior = covariance - (root[:, None] * covariance).T @ np.linalg.solve(
                gram, root[:, None] * covariance
            )
            mean = float(posterior[row] @ shift)
            inside = 1.0 / posterior[row, row] - precision[row]
            variance = 1.0 / max(inside, 1e-9)
            middle = variance * (mean / posterior[row, row] - shift[row])
            z = (middle - limits[row]) / math.sqrt(variance)
            ratio = math.exp(-0.5 * z * z - 0.5 * math.log(2 * math.pi) - float(log_ndtr(z)))
            spread = variance * max(1.0 - ratio * (z + ratio), 1e-6)
            precision[row] = max(1.0 / spread - 1.0 / variance, 1e-9)
            shift[row] = (middle + math.sqrt(variance) * ratio) / spread - middle / variance
    return precision, shift
