"""Strategy ``model``: the point that most improves the recommendation, by the structural model of the operator.

The logarithm of a point's latency is taken as

    log f(x; rates) + offset + deviation(x) + noise

with f the latency formula of the cost model. Its rates have a prior (the cost model in force, or what ships), the
offset is common to all points, and the deviation, what the formula does not know, is a Gaussian process over the
knobs. The rates are refitted to the rows so far; around that fit the model is linear in them, so that mean and
interval of every point, and what points share, follow in closed form. The search ends when no point promises more;
where that is after a few points, those that the process promises without the formula come first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import log_ndtr, ndtr

from cost_model.calibration_fit import Z90, fit_operator
from cost_model.rates import CostModel, Rate, RateView
from cost_model.sample_formulas import FITTED, fitted_rates, sample_seconds
from cost_model.samples import Observation
from tuner.proposals.kernel import KnobKernel
from tuner.proposals.peak import Needed, chances
from tuner.routing.rows import routing_values
from tuner.space import Config, Scalar, Space, config_id

Array = npt.NDArray[np.float64]

STOP_GAIN = 5e-3
"""Expected improvement, as a share of the best latency, below which no further point is worth its launch."""
_FEWEST = 5
"""Measured points before the search may end: fewer show too little of what the formula misses."""
_DOUBTED_UNTIL = 8
"""Measured points before which an end is the formula's word alone: the Gaussian process without it is asked as well."""
_BOTH = "forward_backward"
_OFFSET_SD = 1.0
_LOOSEST, _PROBED = 1.5 / Z90, 0.5 / Z90
_NOISE_SD = 0.01
_PRUNED_SD = 0.08
_DEVIATIONS = (0.02, 0.05, 0.1, 0.2, 0.4)
_USUAL_DEVIATION, _DEVIATION_SPREAD = 0.1, 0.8
_REACHES = (0.25, 0.6, 1.5)
_ROUGH = 0.1
"""Share of the deviation's variance that a neighbour tells nothing of: launches and caches are no smooth functions."""
_NEARLY = 0.02
_ENOUGH_LOST, _LIKELY = 2, 0.5
"""Launches that ran out of memory, after which nothing is launched that probably does; unless nothing was measured."""
_BOLDNESS, _UNEXPECTED = 0.25, 1
"""Share of the risk still taken after a launch ran out of memory; one that its bound let through counts for more."""
_SURELY = 0.95
"""Of the best chance to fit: points above it stay open where none is as sure as it should be."""
_STEP = 1e-4
_OTHER_SHAPE = 0.3
_SHORTEST_S, _LONGEST_S = 1e-9, 30 * 86_400.0
_SCALAR_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A point that may be launched, with its Eq. 6 bound (None where nothing is known of it)."""

    config: Config
    bound_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """A measured point.

    Attributes:
        seconds: of the fast mode by pass; both passes together as ``forward_backward``.
        noise: relative standard deviation of that median.
        pruned: stopped after its first repeat.
    """

    config: Config
    seconds: Mapping[str, float]
    noise: float = _NOISE_SD
    pruned: bool = False

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Problem:
    """What is to be recommended: the best of ``candidates`` for one operator and shape.

    Attributes:
        formula: the operator's name where a latency formula holds for it (our own provider), else None: then only
            the Gaussian process speaks.
        shape: with ``ranks``.
        prior: the cost model that the rates start from.
        warm: older measurements of this hardware; those of other shapes inform the rates first of all.
        bound_rules: Eq. 6 refuses points. Without it the bounds, where known, only say how peaks compare.
    """

    formula: str | None
    shape: Mapping[str, Any]
    space: Space
    candidates: tuple[Candidate, ...]
    prior: CostModel
    warm: tuple[Observation, ...] = ()
    bound_rules: bool = True

    @staticmethod
    def of(
        operator: str,
        provider: str,
        *,
        shape: Mapping[str, Any],
        ranks: int,
        space: Space,
        candidates: Iterable[Candidate],
        prior: CostModel,
        warm: Iterable[Observation] = (),
        bound_rules: bool = True,
    ) -> Problem:
        """The formula is used for our own operators only; baselines run another schedule.

        Where it lacks a size it is left aside, and so are older rows that lack one.
        """
        formula = operator if provider == "flatpeak" and operator in FITTED else None
        whole = {**_routing(operator, shape, ranks), **shape, "ranks": ranks}
        one = Problem(formula, whole, space, tuple(candidates), prior, bound_rules=bound_rules)
        if formula is None or not all(
            _has_formula(prior, formula, one.values(c.config)) for c in one.candidates
        ):
            return replace(one, formula=None)
        return replace(
            one,
            warm=tuple(
                w
                for w in warm
                if w.operator == formula and _is_a_time(w.seconds) and _has_formula(prior, formula, w.values)
            ),
        )

    def values(self, config: Mapping[str, Scalar]) -> dict[str, Any]:
        """Shape and knobs as the formulas read them."""
        scalar = _SCALAR_BYTES.get(str(self.shape.get("dtype", "float32")), 4)
        return {"scalar_bytes": scalar, **self.shape, **config}

    @cached_property
    def warm_rates(self) -> dict[str, Rate]:
        """The rates that fit the older rows best; those rows stay as they are, so they are fitted once."""
        rates = dict(self.prior.rates)
        return {**rates, **fit_operator(rates, self.warm).rates} if self.warm else rates

    @cached_property
    def doubted(self) -> Problem | None:
        """The same without the formula; None where there is none, or where older rows speak of this very shape."""
        if self.formula is None or any(_same_shape(self.shape, w.values) for w in self.warm):
            return None
        return replace(self, formula=None, warm=())

    @cached_property
    def kernel(self) -> KnobKernel:
        return KnobKernel(self.space, [c.config for c in self.candidates])


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The next point: why (expected gain as a share of the best latency), and what is expected of it in seconds.

    ``expected_gain`` is infinite for a first point: nothing is there to improve upon.
    """

    config: Config
    expected_gain: float
    predicted_s: float
    low_s: float
    high_s: float


def _routing(operator: str, shape: Mapping[str, Any], ranks: int) -> dict[str, float]:
    """A router's profile as the numbers that the formula reads; nothing where it is not known."""
    if operator != "pipelined_llep":
        return {}
    try:
        return routing_values(shape, ranks)
    except (KeyError, ValueError):  # the rules of operators are errors of value too
        return {}


def _is_a_time(seconds: float) -> bool:
    """Whether a call can take so long: logarithms and their fits stay within bounds."""
    return _SHORTEST_S <= seconds <= _LONGEST_S


def _has_formula(prior: CostModel, operator: str, values: Mapping[str, Any]) -> bool:
    try:
        sample_seconds(prior.view(), operator, values, _BOTH)
    except KeyError:
        return False
    return True


def suggest(
    problem: Problem,
    seen: Sequence[Seen],
    *,
    taken: Iterable[Config],
    limit_bytes: int,
    needed: Sequence[Needed] = (),
    running: Sequence[Config] = (),
    seed: int = 0,
    stop_gain: float = STOP_GAIN,
) -> Suggestion | None:
    """The candidate with the largest expected improvement among those that fit, or None when none is worth it.

    Eq. 6 is a hard constraint: no point is proposed whose bound exceeds the limit. The bound is corrected by what
    was seen: a peak above its bound raises all bounds by that ratio, and no point is proposed whose bound reaches
    that of one that ran out of memory. Where no bound rules, peaks are learned from the launches, the improvement is
    weighed by the chance to fit, and every launch that ran out of memory asks for a better chance.

    Args:
        taken: configurations that were launched or failed.
        seen: measured points; one whose time no call can take is a point that failed.
        needed: memory of launched points, those that ran out of it included.
        running: launched, not measured yet: taken as measured at the mean, so that their neighbours wait for them.
        seed: decides between points whose expected improvements are within 2 % of the largest.
        stop_gain: share of the best latency; the search ends when no point promises more.
    """
    taken = list(taken)
    gone = {config_id(c) for c in (*taken, *running, *(s.config for s in seen))}
    seen = [one for one in seen if all(_is_a_time(t) for t in (*one.seconds.values(), one.total_s))]
    open_ = [c for c in problem.candidates if config_id(c.config) not in gone]
    fitting = _within_bounds(problem, open_, needed, limit_bytes)
    if not fitting:
        return None
    configs = [c.config for c in fitting]
    beliefs = _beliefs(problem, seen, configs, running)
    mean = sum((b.weight * b.mean for b in beliefs), np.zeros(len(configs)))
    spread = sum((b.weight * (b.sd**2 + (b.mean - mean) ** 2) for b in beliefs), np.zeros(len(configs)))
    first = not seen and not running
    if first:
        gains = np.exp(mean.min() - mean)
    else:
        gains = sum((b.weight * _improvement(b.mean, b.sd, b.best) for b in beliefs), np.zeros(len(configs)))
    chance, asked = _chances(problem, fitting, needed, limit_bytes)
    gains = gains * chance
    safe = chance >= asked
    if seen and _lost(needed, limit_bytes) >= _ENOUGH_LOST and float(chance.max()) < _LIKELY:
        return None
    if len(seen) >= _FEWEST and float(gains.max()) < stop_gain:
        if len(seen) >= _DOUBTED_UNTIL or problem.doubted is None:
            return None
        return suggest(
            problem.doubted,
            seen,
            taken=taken,
            limit_bytes=limit_bytes,
            needed=needed,
            running=running,
            seed=seed,
            stop_gain=stop_gain,
        )
    if len(seen) >= _FEWEST and float(gains[safe].max()) < stop_gain:
        # all that promises anything may not fit: the least certain of the safe points tells most of the others
        nearly = np.flatnonzero(safe & (chance <= chance[safe].min()))
    else:
        nearly = np.flatnonzero(safe & (gains >= (1 - _NEARLY) * gains[safe].max()))
    chosen = int(np.random.default_rng(seed + 7919 * (len(seen) + len(running))).choice(nearly))
    centre, width = float(mean[chosen]), Z90 * math.sqrt(float(spread[chosen]))
    return Suggestion(
        configs[chosen],
        math.inf if first else float(gains[chosen]),
        math.exp(centre),
        math.exp(centre - width),
        math.exp(centre + width),
    )


def _within_bounds(
    problem: Problem, points: Sequence[Candidate], needed: Sequence[Needed], limit_bytes: int
) -> list[Candidate]:
    """Points that Eq. 6, corrected by the peaks there were, lets through."""
    if not problem.bound_rules:
        return list(points)
    bounded = [(n.bound_bytes, n.peak_bytes) for n in needed if n.bound_bytes]
    excess = max([1.0, *(peak / bound for bound, peak in bounded if peak is not None)])
    over = min((bound for bound, peak in bounded if peak is None), default=math.inf)
    return [
        c
        for c in points
        if c.bound_bytes is None or (c.bound_bytes * excess <= limit_bytes and c.bound_bytes < over)
    ]


def _chances(
    problem: Problem, points: Sequence[Candidate], needed: Sequence[Needed], limit_bytes: int
) -> tuple[Array, float]:
    """Chance of every point to fit (1 where Eq. 6 rules), and the least that a launch may have."""
    ruled = problem.bound_rules and all(c.bound_bytes is not None for c in points)
    lost = _lost(needed, limit_bytes)
    if ruled and not lost:
        return np.ones(len(points)), 1.0
    found = chances(problem.kernel, [(c.config, c.bound_bytes) for c in points], needed, limit_bytes)
    asked = 1.0 - 0.5 * _BOLDNESS ** (lost + (_UNEXPECTED if ruled else 0))
    return found, min(asked, _SURELY * float(found.max()))


def _lost(needed: Sequence[Needed], limit_bytes: int) -> int:
    return sum(one.peak_bytes is None or one.peak_bytes > limit_bytes for one in needed)


def _improvement(mean: Array, sd: Array, best: float) -> Array:
    """Expected 1 - y/best where y falls below best, y log-normal."""
    sd = np.maximum(sd, 1e-9)
    z = (best - mean) / sd
    below = ndtr(z)
    shifted = np.exp(mean - best + 0.5 * sd**2 + log_ndtr(z - sd))
    return np.maximum(0.0, below - shifted)


@dataclass(frozen=True, slots=True)
class _Belief:
    """What one size and reach of the deviation makes of the rows.

    Attributes:
        weight: how well it explains them; weights of all beliefs add to 1.
        mean, sd: of log seconds of the configurations asked for.
        best: lowest mean of a measured point.
    """

    weight: float
    mean: Array
    sd: Array
    best: float


def _beliefs(
    problem: Problem, seen: Sequence[Seen], configs: Sequence[Config], running: Sequence[Config] = ()
) -> list[_Belief]:
    """Posteriors of log seconds of ``configs``.

    Few rows tell little about the deviation's size and reach, so all that explain them are kept by their weight: the
    likeliest alone would be too sure of itself, and end the search too soon. Points that run are taken as measured
    at their mean: means stay as they are, and what they will tell is no longer worth a launch elsewhere.
    """
    warm = problem.warm if problem.formula is not None else ()
    structure = _Structure(problem, seen, warm)
    asked = [*configs, *running]
    points = [problem.values(c) for c in [s.config for s in seen] + asked]
    passes = _passes(seen, warm)
    every = [(values, passes) for values in points] + [(w.values, (w.pass_name,)) for w in warm]
    prior_mean, jacobian = structure.linear(every)
    count, new = len(seen), len(asked)
    rows = np.array([*range(count), *range(count + new, len(every))], dtype=np.intp)
    live = np.arange(count + len(configs), count + new)
    logs = np.array([math.log(s.total_s) for s in seen] + [math.log(w.seconds) for w in warm])
    noise = np.array([max(s.noise, _PRUNED_SD if s.pruned else _NOISE_SD) for s in seen] + [0.03] * len(warm))
    other = np.array([False] * (count + new) + [not _same_shape(problem.shape, w.values) for w in warm])
    known = np.concatenate([rows, live])
    measured, alive = np.arange(len(rows)), np.arange(len(rows), len(known))
    shared = (jacobian[known] * structure.variance) @ jacobian.T
    alone = (jacobian**2) @ structure.variance
    candidates = np.arange(count, count + len(configs))
    best = [*range(count), *live]
    left = logs - prior_mean[rows]
    kernels = {reach: _deviation(problem, every, other, known, reach) for reach in _REACHES}
    found: list[tuple[float, Array, Array]] = []
    for amount, reach in itertools.product(_DEVIATIONS, _REACHES):
        whole = shared + amount**2 * kernels[reach]
        root = np.linalg.cholesky(whole[np.ix_(measured, rows)] + np.diag(noise**2 + 1e-10))
        half = np.linalg.solve(root, left)
        across = np.linalg.solve(root, whole[measured])
        evidence = -0.5 * float(half @ half) - float(np.log(np.diag(root)).sum())
        usual = -0.5 * (math.log(amount / _USUAL_DEVIATION) / _DEVIATION_SPREAD) ** 2
        mean = prior_mean + across.T @ half
        variance = alone + amount**2 - (across**2).sum(axis=0)
        if len(live):
            among = whole[alive] - across[:, live].T @ across
            root = np.linalg.cholesky(among[:, live] + _NOISE_SD**2 * np.eye(len(live)))
            variance = variance - (np.linalg.solve(root, among) ** 2).sum(axis=0)
        found.append((evidence + usual, mean, np.sqrt(np.maximum(variance, 1e-12))))
    most = max(score for score, _, _ in found)
    total = sum(math.exp(score - most) for score, _, _ in found)
    return [
        _Belief(
            math.exp(score - most) / total,
            mean[candidates],
            sd[candidates],
            float(mean[best].min()) if best else math.inf,
        )
        for score, mean, sd in found
    ]


def _passes(seen: Sequence[Seen], warm: Sequence[Observation]) -> tuple[str, ...]:
    """The passes that a repetition of this sweep consists of."""
    if seen:
        return tuple(seen[0].seconds)
    names = sorted({w.pass_name for w in warm}, reverse=True)
    return tuple(names) or (_BOTH,)


def _same_shape(shape: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    return all(values.get(key) == value for key, value in shape.items() if isinstance(value, int | float))


def _deviation(
    problem: Problem,
    every: Sequence[tuple[Mapping[str, Any], tuple[str, ...]]],
    other: npt.NDArray[np.bool_],
    known: npt.NDArray[np.intp],
    reach: float,
) -> Array:
    """Correlation of what the formula misses, of ``known`` points with all: knob by knob, and weak between shapes."""
    between = problem.kernel.matrix([values for values, _ in every], reach, rows=known)
    strange = other[known, None] | other[None, :]
    strange[np.arange(len(known)), known] = False
    smooth = np.where(strange, _OTHER_SHAPE * between, between)
    same = smooth > 1.0 - 1e-9
    return (1.0 - _ROUGH) * smooth + _ROUGH * same


class _Structure:
    """The formula around the rates that fit the rows best; without a formula, an offset alone."""

    def __init__(self, problem: Problem, seen: Sequence[Seen], warm: Sequence[Observation]) -> None:
        self._operator = problem.formula
        self._rates: dict[str, Rate] = dict(problem.prior.rates)
        self._names: list[str] = []
        if self._operator is None:
            self.variance = np.array([_OFFSET_SD**2])
            self._moved = np.zeros(0)
            return
        rows = _observed(problem, self._operator, seen)
        of_rows = (problem.shape, *(row.values for row in (*rows, *warm)))
        self._names = fitted_rates(RateView(self._rates), self._operator, of_rows)
        before = np.array([math.log(self._rates[name].value) for name in self._names])
        widths = [_prior_sd(self._rates[name]) for name in self._names]
        self._rates = dict(problem.warm_rates)
        if rows:
            # what older rows said of a rate is in its interval by now
            settled = self._names if warm else ()
            self._rates.update(fit_operator(self._rates, rows, settled).rates)
        now = np.array([math.log(self._rates[name].value) for name in self._names])
        self._moved = before - now
        self.variance = np.array([*(w**2 for w in widths), _OFFSET_SD**2])

    def linear(self, every: Sequence[tuple[Mapping[str, Any], tuple[str, ...]]]) -> tuple[Array, Array]:
        """Prior mean of log seconds [n], and its derivatives by log rate and by the offset [n, rates + 1]."""
        ones = np.ones((len(every), 1))
        if self._operator is None:
            return np.zeros(len(every)), ones
        centre = self._logs(every, None)
        columns = []
        for name in self._names:
            moved = self._rates[name].value * math.exp(-_STEP)  # downwards: a share may stand at 1
            columns.append((centre - self._logs(every, (name, moved))) / _STEP)
        slopes = np.stack(columns, axis=1)
        return centre + slopes @ self._moved, np.hstack([slopes, ones])

    def _logs(
        self,
        every: Sequence[tuple[Mapping[str, Any], tuple[str, ...]]],
        override: tuple[str, float] | None,
    ) -> Array:
        assert self._operator is not None
        view = RateView(self._rates, override)
        return np.array(
            [
                math.log(
                    max(1e-12, sum(sample_seconds(view, self._operator, values, name) for name in passes))
                )
                for values, passes in every
            ]
        )


def _observed(problem: Problem, operator: str, seen: Sequence[Seen]) -> list[Observation]:
    return [
        Observation(operator, name, problem.values(one.config), seconds, 1, 0.0, None)
        for one in seen
        for name, seconds in one.seconds.items()
    ]


def _prior_sd(rate: Rate) -> float:
    """As wide as the calibration takes a prior, a factor of 4.5 for what was never measured."""
    width = max(math.log(rate.high / rate.value), math.log(rate.value / rate.low)) / Z90
    return max(width, _PROBED if rate.provenance in ("measured", "interpolated") else _LOOSEST)
