"""Any strategy over a recorded sweep, offline: how soon it finds the best point, and what it launches in vain."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

import numpy as np

from cost_model.calibration import CostModel
from cost_model.errors import RuleError
from cost_model.samples import Observation
from tuner.measuring.modes import split_modes
from tuner.proposals.model import Candidate, Problem, Seen, suggest
from tuner.proposals.peak import Needed
from tuner.proposals.prior import prior_for, shipped_for_others
from tuner.proposals.samplers import Known, propose
from tuner.registry import load_adapter, operator_names
from tuner.replaying.table import Recorded, Table
from tuner.space import Config

STRATEGIES = ("model", "tpe", "gp", "random", "grid")
WITHIN = 0.02
_MISSES = 12
Bounds = Literal["rule", "shape", "none"]
Told = Literal["constraints", "fail"]


@dataclass(frozen=True, slots=True)
class Options:
    """How a table is replayed.

    Attributes:
        trials: most points that are launched.
        limit_bytes: memory of one rank; None: everything that was recorded fits.
        bounds: ``rule``: Eq. 6 refuses points before they are launched, as in a real sweep. ``shape``: it refuses
            nothing, but strategy ``model`` knows it as it knows its latency formula. ``none``: it is withheld, and
            all strategies see only what their own launches show.
        told: how an infeasible point is told to Optuna's samplers; ``fail`` only to show what it does.
        redraw: a launch draws its repeats anew from the recorded ones, as measuring again would.
    """

    trials: int = 16
    limit_bytes: int | None = None
    bounds: Bounds = "rule"
    told: Told = "constraints"
    redraw: bool = True


@dataclass(frozen=True, slots=True)
class Run:
    """One strategy, one seed.

    Attributes:
        regret: after each launch, the true latency of the point that one would recommend then, over the best
            feasible one's, minus 1; infinite while nothing feasible was launched.
        reached: launches until a feasible point within 2 % of the best was among them; None: never.
        infeasible: launches whose recorded peak exceeds the limit.
        ruled_out: proposals that Eq. 6 refused without a launch.
        stopped: the strategy said that nothing more is worth a launch.
    """

    seed: int
    launched: tuple[Config, ...]
    regret: tuple[float, ...]
    reached: int | None
    infeasible: int
    ruled_out: int
    stopped: bool


@dataclass(frozen=True, slots=True)
class Summary:
    """A strategy on a table over several seeds; ``reached_median`` counts a miss as one launch more than allowed."""

    strategy: str
    table: str
    points: int
    feasible: int
    best_config: Config
    best_latency_s: float
    limit_bytes: int | None
    seeds: int
    trials: int
    reached_median: float
    reached_worst: int
    missed: int
    launched_median: float
    infeasible_median: float
    infeasible_most: int
    ruled_out_median: float
    final_regret_median: float
    regret_curve: tuple[float | None, ...]
    runs: tuple[Run, ...] = field(repr=False, default=())

    def to_json(self) -> dict[str, Any]:
        """Plain figures; what is infinite is null."""
        body = asdict(self)
        body["runs"] = [
            {**asdict(run), "regret": [r if math.isfinite(r) else None for r in run.regret]}
            for run in self.runs
        ]
        body["final_regret_median"] = _finite(self.final_regret_median)
        return body


def feasible(point: Recorded, options: Options) -> bool:
    """Whether a sweep with these options could end with the point."""
    if options.limit_bytes is None:
        return True
    if options.bounds == "rule" and point.bound_bytes is not None and point.bound_bytes > options.limit_bytes:
        return False
    return point.peak_bytes is None or point.peak_bytes <= options.limit_bytes


def _bound_told(point: Recorded, options: Options) -> int | None:
    return None if options.bounds == "none" else point.bound_bytes


def _shipped(table: Table) -> Sequence[Observation]:
    if table.operator not in operator_names():
        return ()
    version = load_adapter(table.operator).version
    shape = {**table.shape, "ranks": table.ranks}
    return shipped_for_others(table.operator, version, table.hardware_id, shape)


def _least_bytes(table: Table, options: Options) -> int:
    """Smallest limit under which some point is feasible."""
    return min(
        max(point.peak_bytes or 0, (point.bound_bytes or 0) if options.bounds == "rule" else 0)
        for point in table.points
    )


def replay(
    table: Table,
    strategy: str,
    options: Options,
    *,
    seeds: Sequence[int],
    prior: CostModel | None = None,
    warm: Sequence[Observation] | None = None,
) -> Summary:
    """Run ``strategy`` over ``table`` once for every seed.

    Args:
        prior: of strategy ``model``; by default what ships for the table's hardware.
        warm: older measurements of the same hardware, for strategy ``model``; by default what ships of it for other
            shapes, for a sweep of a new shape has no other rows.

    Raises:
        RuleError: unknown strategy; no point of the table fits.
    """
    if strategy not in STRATEGIES:
        raise RuleError(
            rule=f"a strategy is one of {', '.join(STRATEGIES)}", value=strategy, remedy="Choose one."
        )
    fits = [point for point in table.points if feasible(point, options)]
    if not fits:
        raise RuleError(
            rule="a replay needs a point within the memory limit",
            value=options.limit_bytes,
            remedy=f"Give at least {_least_bytes(table, options)} bytes: so much does the smallest point need.",
        )
    best = min(fits, key=lambda point: point.latency_s)
    if warm is None:
        warm = _shipped(table) if strategy == "model" else ()
    problem = Problem.of(
        table.operator,
        table.provider,
        shape=table.shape,
        ranks=table.ranks,
        space=table.space,
        candidates=[Candidate(p.config, _bound_told(p, options)) for p in table.points],
        bound_rules=options.bounds == "rule",
        prior=prior or prior_for(table.hardware_id, int(table.shape.get("nodes", 1))),
        warm=warm,
    )
    runs = tuple(
        _Replay(table, options, best.latency_s, seed=seed, problem=problem).run(strategy) for seed in seeds
    )
    reached = [run.reached if run.reached is not None else options.trials + 1 for run in runs]
    curves = [_padded(run.regret, options.trials) for run in runs]
    return Summary(
        strategy=strategy,
        table=table.name,
        points=len(table.points),
        feasible=len(fits),
        best_config=best.config,
        best_latency_s=best.latency_s,
        limit_bytes=options.limit_bytes,
        seeds=len(runs),
        trials=options.trials,
        reached_median=float(median(reached)),
        reached_worst=max(reached),
        missed=sum(run.reached is None for run in runs),
        launched_median=float(median(len(run.launched) for run in runs)),
        infeasible_median=float(median(run.infeasible for run in runs)),
        infeasible_most=max(run.infeasible for run in runs),
        ruled_out_median=float(median(run.ruled_out for run in runs)),
        final_regret_median=float(median(curve[-1] for curve in curves)),
        regret_curve=tuple(_finite(median(curve[i] for curve in curves)) for i in range(options.trials)),
        runs=runs,
    )


def _padded(curve: Sequence[float], length: int) -> list[float]:
    return [*curve, *[curve[-1] if curve else math.inf] * (length - len(curve))]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class _Replay:
    """One run: what was launched so far, and what the strategy knows of it."""

    def __init__(
        self,
        table: Table,
        options: Options,
        best_s: float,
        *,
        seed: int,
        problem: Problem,
    ) -> None:
        self._table, self._options, self._best_s, self._seed = table, options, best_s, seed
        self._limit = options.limit_bytes if options.limit_bytes is not None else 2**62
        self._noise = np.random.default_rng(seed)
        self._known: list[Known] = []
        self._seen: list[Seen] = []
        self._needed: list[Needed] = []
        self._launched: list[Recorded] = []
        self._regret: list[float] = []
        self._ruled_out = 0
        self._orders = {
            "grid": self._order(_in_order(table)),
            "random": self._order(_shuffled(table, seed)),
        }
        ruled = options.bounds == "rule"
        self._points = [
            p.config
            for p in table.points
            if not ruled or p.bound_bytes is None or p.bound_bytes <= self._limit
        ]
        self._problem = problem

    def run(self, strategy: str) -> Run:
        stopped, misses = False, 0
        while len(self._launched) < self._options.trials:
            # a space of which only parts were recorded has points that the table cannot answer for
            config = self._next(strategy if misses < _MISSES else "random")
            if config is None:
                stopped = len(self._known) < len(self._table.points)
                break
            misses = 0 if self._take(config) else misses + 1
        reached = next(
            (
                number
                for number, point in enumerate(self._launched, 1)
                if feasible(point, self._options) and point.latency_s <= (1 + WITHIN) * self._best_s
            ),
            None,
        )
        return Run(
            seed=self._seed,
            launched=tuple(point.config for point in self._launched),
            regret=tuple(self._regret),
            reached=reached,
            infeasible=sum(not feasible(point, self._options) for point in self._launched),
            ruled_out=self._ruled_out,
            stopped=stopped,
        )

    def _next(self, strategy: str) -> Config | None:
        if strategy in ("grid", "random"):
            return next(self._orders[strategy], None)
        if strategy != "model":
            return propose(
                strategy,
                self._table.space,
                self._known,
                seed=self._seed,
                limit_bytes=self._limit,
                points=self._points,
            )
        suggestion = suggest(
            self._problem,
            self._seen,
            taken=[known.config for known in self._known],
            limit_bytes=self._limit,
            needed=self._needed,
            seed=self._seed,
        )
        return None if suggestion is None else suggestion.config

    def _order(self, points: Iterable[Config]) -> Iterator[Config]:
        for config in points:
            if all(known.config != config for known in self._known):
                yield config

    def _take(self, config: Config) -> bool:
        """Launch a point, unless Eq. 6 refuses it; False when the table does not have it."""
        point = self._table.find(config)
        if point is None:
            self._known.append(Known(config, None, None, None, ended=True, failed=True))
            return False
        bound = point.bound_bytes if self._options.bounds == "rule" else None
        if bound is not None and bound > self._limit:
            self._ruled_out += 1
            self._known.append(Known(config, None, bound, None, ended=True, out_of_memory=True))
            return True
        self._launched.append(point)
        if not feasible(point, self._options):
            self._infeasible(point, bound)
        else:
            seconds = self._measured(point)
            total = sum(seconds.values())
            self._seen.append(Seen(config, seconds, noise=_noise(point)))
            if point.peak_bytes is not None:
                self._needed.append(Needed(config, _bound_told(point, self._options), point.peak_bytes))
            self._known.append(Known(config, total, bound, point.peak_bytes, ended=True))
        self._regret.append(self._regret_now())
        return True

    def _infeasible(self, point: Recorded, bound: int | None) -> None:
        """It ran out of memory: nothing was timed, and the peak it would have had is not known."""
        self._needed.append(Needed(point.config, _bound_told(point, self._options), None))
        failed = self._options.told == "fail"
        self._known.append(
            Known(point.config, None, bound, None, ended=True, failed=failed, out_of_memory=True)
        )

    def _measured(self, point: Recorded) -> dict[str, float]:
        if not self._options.redraw:
            return point.seconds
        return {
            name: split_modes(list(self._noise.choice(times, size=len(times)))).fast_s
            for name, times in point.repeats.items()
        }

    def _regret_now(self) -> float:
        if not self._seen:
            return math.inf
        advised = min(self._seen, key=lambda seen: seen.total_s)
        point = self._table.find(advised.config)
        assert point is not None
        return point.latency_s / self._best_s - 1.0


def _in_order(table: Table) -> list[Config]:
    """Recorded points as a grid visits them, the last knob varying fastest; not the grid itself, which may be vast."""

    def place(config: Config) -> list[int]:
        return [k.values.index(config[k.name]) if k.name in config else -1 for k in table.space.knobs]

    return sorted((point.config for point in table.points), key=place)


def _shuffled(table: Table, seed: int) -> list[Config]:
    configs = _in_order(table)
    random.Random(seed).shuffle(configs)
    return configs


def _noise(point: Recorded) -> float:
    """Relative standard deviation of the fast mode's median, all passes together."""
    relative = []
    for times in point.repeats.values():
        fast = [t for t in times if t <= 1.12 * min(times)]
        if len(fast) > 1:
            relative.append(float(np.std(fast, ddof=1)) / float(np.mean(fast)) / math.sqrt(len(fast)))
    return max([0.005, *relative])
