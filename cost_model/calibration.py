"""Fitting a cost model to a sweep: what is promoted, how far it is off on rows it has not seen, what it covers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from cost_model.calibration_fit import fit_operator, log_errors
from cost_model.coverage import OutsideMeasured, box, coverage, features
from cost_model.errors import RuleError
from cost_model.provenance import Estimate
from cost_model.rates import CostModel, Rate, RateView, content_id
from cost_model.rates_default import default_cost_model
from cost_model.sample_formulas import FITTED, sample_seconds
from cost_model.samples import Observation, read_samples

__all__ = [
    "CostModel",
    "FitReport",
    "FitResult",
    "OperatorReport",
    "OutsideMeasured",
    "Rate",
    "default_cost_model",
    "fit",
    "predict",
]

FEWEST_ROWS = 6
"""Below this many configurations nothing can be held out, so nothing is fitted."""
_HELD_OUT_SHARE = 0.3
_LEVEL = 0.9
_MARGIN = 1.25
"""Too few held-out rows for the 90 % quantile: the largest error, with this margin."""
_NOTABLE_SLOW_SHARE = 0.0


@dataclass(frozen=True, slots=True)
class OperatorReport:
    """What a fit made of one operator's rows. Errors are medians of abs(log(predicted/measured))."""

    operator: str
    rows: int
    held_out: int
    median_error: float
    prior_error: float
    """The same of the model in force."""
    promoted: bool
    bimodal: tuple[dict[str, Any], ...] = ()
    """Configurations with two latency modes: their key, the slow mode's share and its seconds over the fast one's."""
    message: str = ""


@dataclass(frozen=True, slots=True)
class FitReport:
    """A fit's outcome, operator by operator."""

    operators: tuple[OperatorReport, ...]
    foreign_rows: int
    """Rows of other hardware: left out, never used."""
    messages: tuple[str, ...] = ()

    @property
    def promoted(self) -> bool:
        """Whether any operator's fit replaces the model in force."""
        return any(operator.promoted for operator in self.operators)

    def to_json(self) -> dict[str, Any]:
        """Plain figures."""
        return {**asdict(self), "promoted": self.promoted}


@dataclass(frozen=True, slots=True)
class FitResult:
    """``cost_model`` is the prior itself where nothing was promoted."""

    cost_model: CostModel
    report: FitReport = field(default_factory=lambda: FitReport((), 0))


def fit(
    samples: pd.DataFrame,
    prior: CostModel,
    *,
    software: str = "",
    created: str | None = None,
    seed: int = 0,
) -> FitResult:
    """Fits the rates of every operator in ``samples`` around ``prior``.

    Rows of ``prior.hardware_id`` and provider ``flatpeak`` only. Each operator is fitted on 70 % of its
    configurations; the model is promoted for that operator only if its median error on the other 30 % is below that
    of ``prior``, and is then fitted again on all of them. The held-out errors' 90 % quantile (split conformal) is
    the spread its predictions carry.

    Args:
        samples: sweep rows (``cost_model.samples.COLUMNS``).
        prior: the model in force.
        software: what the rows were measured under.
        created: RFC 3339 time of the fit; now when not given.
        seed: of the split.
    """
    told = read_samples(samples, prior.hardware_id)
    rows, foreign = told.rows, told.foreign
    messages: list[str] = []
    if told.strange:
        messages.append(f"{told.strange} rows that no group can have taken were left out ({told.strangest}).")
    if foreign:
        messages.append(f"{foreign} rows of other hardware than {prior.hardware_id} were left out.")
    model = prior
    reports: list[OperatorReport] = []
    settled: set[str] = set()
    unknown = sorted({row.operator for row in rows} - set(FITTED))
    if unknown:
        messages.append(f"No formula for {', '.join(unknown)}: their rows were left out.")
    for operator in FITTED:
        own = [row for row in rows if row.operator == operator]
        if own:
            before = model
            model, report = _one_operator(model, prior, own, seed, settled)
            reports.append(report)
            settled |= {
                name
                for name, rate in model.rates.items()
                if rate is not before.rates[name] and rate.provenance == "measured"
            }
    if any(report.promoted for report in reports):
        when = created or datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        model = replace(
            model,
            version=prior.version + 1,
            parent_id=prior.id,
            software=software or prior.software,
            created=when,
        )
        model = replace(model, id=content_id(model))
    return FitResult(model, FitReport(tuple(reports), foreign, tuple(messages)))


def _one_operator(
    model: CostModel, prior: CostModel, rows: list[Observation], seed: int, settled: Collection[str] = ()
) -> tuple[CostModel, OperatorReport]:
    operator = rows[0].operator
    bimodal = tuple(
        {
            "pass": row.pass_name,
            "config": {key: row.values[key] for key in sorted(row.values)},
            "slow_share": row.slow_share,
            "slow_over_fast": (row.slow_seconds or row.seconds) / row.seconds,
        }
        for row in rows
        if row.slow_share > _NOTABLE_SLOW_SHARE
    )
    train, held = _split(rows, seed)
    if not held:
        count = _configurations(rows)
        message = (
            f"{operator}: {count} configurations are too few to hold any out; measure {FEWEST_ROWS} or more."
        )
        return model, OperatorReport(operator, len(rows), 0, math.nan, math.nan, False, bimodal, message)
    trial = fit_operator(model.rates, train, settled)
    errors = log_errors({**model.rates, **trial.rates}, {**model.scales, **trial.scales}, held)
    before = log_errors(prior.rates, prior.scales, held)
    error, prior_error = float(np.median(np.abs(errors))), float(np.median(np.abs(before)))
    if error >= prior_error:
        message = f"{operator}: the fit is no better on held-out rows than the model in force, which stays."
        return model, OperatorReport(
            operator, len(rows), len(held), error, prior_error, False, bimodal, message
        )
    final = fit_operator(model.rates, rows, settled)
    old = model.coverage.get(operator, {})
    corners = [{name: bound[end] for name, bound in old.items()} for end in (0, 1)] if old else []
    updated = replace(
        model,
        rates={**model.rates, **final.rates},
        scales={**model.scales, **final.scales},
        spreads={**model.spreads, **_spreads(held, errors)},
        coverage={
            **model.coverage,
            operator: box([*corners, *(features(operator, row.values) for row in rows)]),
        },
    )
    return updated, OperatorReport(operator, len(rows), len(held), error, prior_error, True, bimodal)


def _split(rows: Sequence[Observation], seed: int) -> tuple[list[Observation], list[Observation]]:
    """(train, held out) by configuration: forward and backward of one configuration stay on the same side."""
    configs = sorted({_identity(row) for row in rows})
    if len(configs) < FEWEST_ROWS:
        return list(rows), []
    order = np.random.default_rng(seed).permutation(len(configs))
    chosen = {configs[i] for i in order[: max(2, round(_HELD_OUT_SHARE * len(configs)))]}
    return (
        [row for row in rows if _identity(row) not in chosen],
        [row for row in rows if _identity(row) in chosen],
    )


def _configurations(rows: Sequence[Observation]) -> int:
    return len({_identity(row) for row in rows})


def _identity(row: Observation) -> str:
    return repr(sorted((key, str(value)) for key, value in row.values.items()))


def conformal_spread(errors: npt.NDArray[np.float64], level: float = _LEVEL) -> float:
    """Half width that a fresh absolute error stays within with probability ``level`` (split conformal)."""
    ordered = np.sort(np.abs(errors))
    place = math.ceil((len(ordered) + 1) * level)
    if place > len(ordered):
        return float(ordered[-1]) * _MARGIN
    return float(ordered[place - 1])


def _spreads(held: Sequence[Observation], errors: npt.NDArray[np.float64]) -> dict[str, float]:
    found: dict[str, float] = {}
    for key in sorted({row.key for row in held}):
        own = np.array([e for e, row in zip(errors, held, strict=True) if row.key == key])
        found[key] = conformal_spread(own)
    return found


def predict(
    cost: CostModel, operator: str, values: Mapping[str, Any], pass_name: str, *, strict: bool = False
) -> Estimate:
    """Seconds of one call, with its interval and where it comes from.

    Inside what was measured: ``interpolated``. Outside: a wider interval and an ``OutsideMeasured`` warning.

    Args:
        values: shape and knobs, with ``ranks`` and ``scalar_bytes`` (see ``sample_seconds``).
        strict: refuse instead of warning.

    Raises:
        RuleError: ``strict`` and outside, or so far outside that no figure means anything.
    """
    where = coverage(cost, operator, values)
    measured = bool(cost.coverage.get(operator))
    if measured and not where.covered:
        if strict or where.refused:
            raise RuleError(
                rule=f"a prediction of {operator} lies within what was measured",
                value={key: values[key] for key in sorted(features(operator, values))},
                remedy=where.message,
            )
        warnings.warn(where.message, OutsideMeasured, stacklevel=2)

    def formula(rates: RateView) -> float:
        return sample_seconds(rates, operator, values, pass_name)

    return cost.estimate(
        formula,
        spread=cost.spreads.get(f"{operator}:{pass_name}", 0.0),
        extra_log_width=where.extra_log_width,
        provenance=where.provenance,
    )
