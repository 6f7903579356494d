"""One operator's rates fitted to its observations: robust least squares on a log scale, around a prior."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from cost_model.provenance import Provenance
from cost_model.rates import Rate, RateView
from cost_model.sample_formulas import fitted_rates, sample_seconds
from cost_model.samples import Observation

Z90 = 1.645
_LOOSEST = 1.5
"""Half width (log scale, 90 %) given to a prior nobody measured: a factor of 4.5."""
_PROBED = 0.5
"""The same for a rate that a probe measured by itself."""
_NOISE = 0.1
_NOISE_FLOOR = 0.01


@dataclass(frozen=True, slots=True)
class OperatorFit:
    """Rates that an operator's samples speak for, with the correction per pass that is left over."""

    rates: dict[str, Rate]
    scales: dict[str, float]
    noise: float
    """Robust standard deviation of the log residuals."""


def log_errors(
    rates: Mapping[str, Rate], scales: Mapping[str, float], rows: Sequence[Observation]
) -> npt.NDArray[np.float64]:
    """log(predicted / measured) of every row."""
    view = RateView(rates, None, scales)
    return np.array(
        [
            math.log(max(1e-12, sample_seconds(view, row.operator, row.values, row.pass_name)) / row.seconds)
            for row in rows
        ]
    )


def _half_width(rate: Rate, settled: bool) -> float:
    """Half width of the prior.

    What was never measured may be far off, whatever its datasheet interval says; what was measured alone (a probe)
    is met again among other work, so it may move too.
    """
    width = max(math.log(rate.high / rate.value), math.log(rate.value / rate.low))
    if settled:
        return max(width, _NOISE_FLOOR)
    return max(width, _PROBED if rate.provenance in ("measured", "interpolated") else _LOOSEST)


def _top(rate: Rate) -> float:
    return 0.0 if rate.unit == "share" else math.inf


def fit_operator(
    rates: Mapping[str, Rate], rows: Sequence[Observation], settled: Collection[str] = ()
) -> OperatorFit:
    """Fits the rates that ``rows`` (of one operator) inform; the rest stay at ``rates``.

    Parameters are logarithms, residuals log(predicted/measured) over the noise, with a soft L1 loss; the prior
    adds one residual a parameter, so what the rows do not determine stays where it was, with its own interval.
    ``settled`` rates were fitted to another operator's rows a moment ago: their intervals are taken at their word,
    so that operators which share a rate do not pull it back and forth. Intervals come from the curvature at the
    optimum (prior included) and the noise that was really seen.
    """
    operator = rows[0].operator
    names = fitted_rates(RateView(rates), operator, (row.values for row in rows))
    start = np.array([math.log(rates[name].value) for name in names])
    sd = np.array([_half_width(rates[name], name in settled) / Z90 for name in names])
    upper = np.array([_top(rates[name]) for name in names]) + 1e-9
    unscaled: dict[str, float] = {}

    def with_values(theta: npt.NDArray[np.float64]) -> dict[str, Rate]:
        moved = dict(rates)
        for name, value in zip(names, theta, strict=True):
            central = math.exp(float(value))
            moved[name] = Rate(central, central, central, rates[name].provenance, rates[name].unit)
        return moved

    def solve(
        noise: float, begin: npt.NDArray[np.float64]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        def residuals(theta: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
            return np.concatenate(
                [log_errors(with_values(theta), unscaled, rows) / noise, (theta - start) / sd]
            )

        answer = least_squares(
            residuals, np.minimum(begin, upper - 1e-6), bounds=(-np.inf, upper), loss="soft_l1", max_nfev=40
        )
        return np.asarray(answer.x), np.asarray(answer.jac)

    theta, _ = solve(_NOISE, start)
    noise = _robust_sd(log_errors(with_values(theta), unscaled, rows), len(names))
    theta, jacobian = solve(noise, theta)
    left = log_errors(with_values(theta), unscaled, rows)
    noise = _robust_sd(left, len(names))
    covariance = np.linalg.pinv(jacobian.T @ jacobian)
    spread = np.sqrt(np.clip(np.diag(covariance), 0.0, None))
    fitted: dict[str, Rate] = {}
    for name, value, width, before in zip(names, theta, spread, sd, strict=True):
        prior = rates[name]
        # A rate counts as measured when the rows told clearly more about it than the prior did.
        source: Provenance = "measured" if width < before / 2 else prior.provenance
        central, factor = math.exp(float(value)), math.exp(Z90 * float(width))
        high = central * factor
        if prior.unit == "share":
            central = min(central, 1.0)
            high = max(central, min(1.0, high))
        note = "fitted to a sweep" if source == "measured" else prior.note
        fitted[name] = Rate(central, central / factor, high, source, prior.unit, note)
    keys = sorted({row.key for row in rows})
    scales = {
        key: math.exp(-float(np.median([e for e, row in zip(left, rows, strict=True) if row.key == key])))
        for key in keys
    }
    return OperatorFit(fitted, scales, noise)


def _robust_sd(errors: npt.NDArray[np.float64], parameters: int) -> float:
    """1.48 times the median absolute error, raised for the parameters that the rows paid for."""
    count = len(errors)
    freedom = math.sqrt(count / max(1.0, count - min(parameters, count / 2)))
    return max(_NOISE_FLOOR, 1.4826 * float(np.median(np.abs(errors))) * freedom)
