"""A sweep: created from its spec, extended by its strategy, run trial by trial, settled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from cost_model.errors import RuleError
from db.lifecycle import SWEEP_TERMINAL, TERMINAL, SweepState, TrialState
from db.repositories import IdempotencyRepository, NewTrial, SweepRepository, TrialRepository
from db.session import Database
from db.tables import Sweep, Trial
from tuner.executors.base import OOM_KINDS, Executor, Site
from tuner.proposals.model import Candidate
from tuner.proposals.samplers import Known, propose, spellings
from tuner.registry import OperatorAdapter, answers, check_provider, load_adapter
from tuner.space import Config, Knob, Scalar, Space, config_id
from tuner.sweeping.next_point import suggest_next
from tuner.sweeping.point_bound import bound_terms
from tuner.sweeping.sweep_spec import SweepSpec, parse_sweep, read_sweep_file
from tuner.sweeping.trial import Leases, memory_limit_bytes, over_limit

__all__ = [
    "Extension",
    "SweepOutcome",
    "SweepProgress",
    "SweepSpec",
    "create_sweep",
    "extend_sweep",
    "parse_sweep",
    "progress_of",
    "read_sweep_file",
    "run_sweep",
    "spec_of",
]

_AT_ONCE = ("grid", "random")
_LISTING = ("grid", "random", "model")
MAX_POINTS = 100_000
_MOST_TAUGHT = 32
"""Points beyond the limit that a sampler may propose, and learn from, in one sweep."""
_MOST_BYTES = 2**60
_MOST_VALUE = 2**53
"""Largest value of an ordered knob: JSON and floating point still tell it from its neighbour."""


@dataclass(frozen=True, slots=True)
class SweepProgress:
    """How far a sweep is: trials by state, of how many, the best latency so far, and what runs now."""

    sweep_id: str
    state: SweepState
    reason: str | None
    counts: dict[str, int]
    total: int
    best_latency_s: float | None
    best_config: Config | None
    running: Config | None = None
    phase: dict[str, Any] | None = None

    @property
    def ended(self) -> int:
        """Trials that have their answer."""
        return sum(self.counts.get(state.value, 0) for state in TERMINAL)


@dataclass(frozen=True, slots=True)
class SweepOutcome:
    """How :func:`run_sweep` left the sweep. ``paused`` and ``cancelled`` sweeps say why."""

    sweep_id: str
    state: SweepState
    reason: str | None
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Points:
    """The operator, its legal shape and the space of one sweep."""

    adapter: OperatorAdapter
    spec: SweepSpec
    space: Space

    def new_trial(self, config: Config, strategy: str, limit_bytes: int | None) -> NewTrial:
        terms = self.terms(config)
        bound = sum(terms.values())
        if bound > _MOST_BYTES:
            raise RuleError(
                rule="the Eq. 6 bound of a point must be memory that a machine can have (at most 2^60 bytes)",
                value={"config": config, "bound_bytes": bound},
                remedy="Correct the shape or the knob.",
            )
        rejected = None if limit_bytes is None else over_limit(bound, limit_bytes)
        return NewTrial(config, config_id(config), strategy, bound, terms, rejected)

    def terms(self, config: Config) -> dict[str, int]:
        """Eq. 6 of a point."""
        spec = self.spec
        ranks, device = spec.target.group_size, spec.target.device
        return bound_terms(self.adapter, spec.shape, config, ranks, provider=spec.provider, device=device)

    def all(self) -> list[Config]:
        """Every point in its one spelling, once."""
        found: dict[str, Config] = {}
        for config in self.space.grid():
            one = self.canonical(config)
            found.setdefault(config_id(one), one)
        return list(found.values())

    def some(self, turn: int) -> list[Candidate]:
        """Every point with its bound, once; of a large space some, others at each turn."""
        found: dict[str, Candidate] = {}
        for config in spellings(self.space, self.spec.seed, turn):
            one = self.canonical(config)
            if (identity := config_id(one)) not in found:
                found[identity] = Candidate(one, sum(self.terms(one).values()))
        return list(found.values())

    def candidates(self) -> list[Candidate]:
        """Every point with its bound."""
        return [Candidate(config, sum(self.terms(config).values())) for config in self.all()]

    def within(self, limit_bytes: int, turn: int) -> list[Config]:
        """Those of :meth:`some` that Eq. 6 lets through."""
        return [c.config for c in self.some(turn) if (c.bound_bytes or 0) <= limit_bytes]

    def canonical(self, config: Config) -> Config:
        return self.adapter.canonical(self.spec.shape, config, self.spec.target.group_size)


def _points(spec: SweepSpec) -> _Points:
    adapter = load_adapter(spec.operator)
    check_provider(adapter, spec.provider)
    if spec.target.loopback is not None and not adapter.has_peers:
        raise RuleError(
            rule="loopback stands in for the peers of an operator that has some",
            value=adapter.name,
            remedy="Leave target.loopback out: every rank of this operator works alone.",
        )
    shape = adapter.shape(spec.shape, spec.target.group_size)
    space = adapter.space(shape, spec.target.group_size, spec.provider)
    chosen = _chosen(space, spec)
    if chosen.size > MAX_POINTS and spec.strategy in _LISTING:
        raise RuleError(
            rule=f"{spec.strategy} lists at most {MAX_POINTS} points, knobs left out with the operator's own values",
            value=chosen.size,
            remedy="Shorten the lists, name the knobs that were left out, or choose tpe.",
        )
    return _Points(adapter, spec.model_copy(update={"shape": shape}), chosen)


def _chosen(space: Space, spec: SweepSpec) -> Space:
    """The operator's knobs with the sweep's values; an ordered knob given words is compared by name."""
    for name, values in spec.space.items():
        knob = space.knob(name)
        legal = knob.values
        if knob.kind == "categorical" and (wrong := [v for v in values if v not in legal]):
            raise RuleError(
                rule=f"{name} takes the values of its list",
                value=wrong[0],
                remedy=f"Choose among {list(legal)}.",
            )
        if knob.kind == "ordered" and (wrong := [v for v in values if not _sized(name, v)]):
            whole = "" if name.endswith("_share") else ", whole"
            raise RuleError(
                rule=f"values of {name} must be numbers: finite{whole}, not negative, at most 2^53",
                value=wrong[0],
                remedy="Correct the value.",
            )
    chosen = space.narrowed(spec.space)
    return Space(tuple(_sorted(knob) for knob in chosen.knobs))


def _sized(name: str, value: Scalar) -> bool:
    """Whether an ordered knob may take the value: shares are real, everything else is a count."""
    if not isinstance(value, int | float) or not 0 <= value <= _MOST_VALUE:
        return False
    return name.endswith("_share") or float(value).is_integer()


def _sorted(knob: Knob) -> Knob:
    """Samplers learn an ordered knob by the place of a value in its list."""
    if knob.kind != "ordered":
        return knob
    return replace(knob, values=tuple(sorted(knob.values, key=float)))


def create_sweep(database: Database, spec: SweepSpec, idempotency_key: str | None = None) -> str:
    """Store a sweep with its first trials; those that a stated memory limit rules out are never queued.

    ``grid`` and ``random`` sweeps get all their trials now, ``tpe``, ``gp`` and ``model`` one after the other. A limit
    that is not stated is the one of the machine that claims a trial.

    Args:
        idempotency_key: the same key and spec again give the same sweep.

    Returns:
        The sweep's id.

    Raises:
        RuleError: unknown operator, provider, knob or key; an illegal shape; a grid larger than max_trials;
            an idempotency key used for another spec.
    """
    with answers(spec.operator):
        points = _points(spec)
        spec = points.spec
        request = spec.model_dump(mode="json")
        configs = _first_configs(points)
    try:
        return _store(database, points, configs, request, idempotency_key)
    except _MadeBefore as made:
        return made.sweep_id


class _MadeBefore(Exception):
    """Another request with the same key was a moment faster: this one is rolled back."""

    def __init__(self, sweep_id: str) -> None:
        super().__init__(sweep_id)
        self.sweep_id = sweep_id


def _store(
    database: Database,
    points: _Points,
    configs: list[Config],
    request: dict[str, Any],
    idempotency_key: str | None,
) -> str:
    spec = points.spec
    with database.session() as session:
        keys = IdempotencyRepository(session)
        if (
            idempotency_key is not None
            and (known := keys.find("sweeps", idempotency_key, request)) is not None
        ):
            return known
        sweep = SweepRepository(session).create(
            name=spec.name or f"{points.adapter.name} on {_ranks_in_words(spec)}",
            operator=points.adapter.name,
            provider=spec.provider,
            strategy=spec.strategy,
            ranks=spec.target.ranks,
            device=spec.target.device,
            hardware_id=spec.target.hardware_id,
            spec=request,
            max_trials=min(spec.max_trials, len(configs)) if spec.strategy in _AT_ONCE else spec.max_trials,
        )
        if idempotency_key is not None:
            kept = keys.remember("sweeps", idempotency_key, request, sweep.id)
            if kept != sweep.id:
                raise _MadeBefore(kept)
        TrialRepository(session).add(
            sweep.id, [points.new_trial(c, spec.strategy, spec.memory_limit_bytes) for c in configs]
        )
        return sweep.id


def _ranks_in_words(spec: SweepSpec) -> str:
    loopback = spec.target.loopback
    return f"{spec.target.ranks} ranks" if loopback is None else f"1 rank of {loopback} (loopback)"


def _first_configs(points: _Points) -> list[Config]:
    spec = points.spec
    if spec.strategy not in _AT_ONCE:
        return []
    configs = points.all()
    if spec.strategy == "random":
        order = [points.canonical(c) for c in points.space.shuffled(spec.seed)]
        distinct = {config_id(c): c for c in reversed(order)}
        return list(reversed(distinct.values()))[: spec.max_trials]
    if len(configs) > spec.max_trials:
        raise RuleError(
            rule=f"a grid has at most max_trials = {spec.max_trials} points",
            value=len(configs),
            remedy="Raise max_trials, shorten the lists, or choose the strategy random.",
        )
    return configs


def spec_of(sweep: Sweep) -> SweepSpec:
    """The spec a sweep was created from, with its complete shape."""
    return SweepSpec.model_validate(sweep.spec_json)


class Extension(Enum):
    """What :func:`extend_sweep` found."""

    ADDED = "a point"
    WAITING = "nothing to add now: what runs has to end first, or somebody else was faster"
    COMPLETE = "the last point has been proposed"


def extend_sweep(database: Database, sweep_id: str, site: Site) -> Extension:
    """Propose one point of an adaptive sweep when none is queued.

    A point that Eq. 6 rules out is stored as infeasible, so that the sampler learns from it, a few times; after that
    only points within the limit are proposed.

    Args:
        site: what its trials run on; its memory is the limit where the sweep states none.
    """
    with database.reading() as session:
        sweep = SweepRepository(session).get(sweep_id)
        trials = TrialRepository(session).of_sweep(sweep_id)
    at_work = any(TrialState(t.state) not in TERMINAL for t in trials)
    if SweepState(sweep.state) in SWEEP_TERMINAL:
        return Extension.COMPLETE
    if any(t.state == TrialState.QUEUED.value for t in trials):
        return Extension.WAITING
    if sweep.strategy in _AT_ONCE or _launched(trials) >= sweep.max_trials:
        return Extension.WAITING if at_work else Extension.COMPLETE
    points = _points(spec_of(sweep))
    limit = memory_limit_bytes(points.spec, site)
    config = _next(database, sweep, points, trials, hardware_id=site.hardware_id, limit_bytes=limit)
    if config is None and not trials:  # it ends with a row that says why, as sweeps of other strategies do
        smallest = min(points.some(0), key=lambda one: one.bound_bytes or 0)
        config = smallest.config if (smallest.bound_bytes or 0) > limit else None
    if config is None:
        return Extension.COMPLETE
    new = points.new_trial(config, sweep.strategy, limit)
    with database.session() as session:
        # another worker may have proposed meanwhile: what counts is what the rows say now
        if SweepRepository(session).get(sweep_id, lock=True).state not in ("queued", "running"):
            return Extension.COMPLETE
        if _launched(TrialRepository(session).of_sweep(sweep_id)) >= sweep.max_trials:
            return Extension.WAITING
        added = TrialRepository(session).add(sweep_id, [new])
    return Extension.ADDED if added else Extension.WAITING


def _next(
    database: Database,
    sweep: Sweep,
    points: _Points,
    trials: list[Trial],
    *,
    hardware_id: str,
    limit_bytes: int,
) -> Config | None:
    """The point that an adaptive strategy proposes, in its one spelling; None when there is none."""
    if sweep.strategy == "model":
        suggestion = suggest_next(
            database,
            sweep.id,
            points.spec,
            points.adapter,
            points.space,
            candidates=points.candidates(),
            trials=trials,
            hardware_id=hardware_id,
            limit_bytes=limit_bytes,
        )
        return None if suggestion is None else points.canonical(suggestion.config)
    teach = len(trials) - _launched(trials) < _MOST_TAUGHT
    most = _MOST_BYTES if teach else limit_bytes

    def place(config: Config) -> Config | None:
        point = points.canonical(config)
        return point if sum(points.terms(point).values()) <= most else None

    return propose(
        sweep.strategy,
        points.space,
        [_known(t) for t in trials],
        seed=points.spec.seed,
        limit_bytes=limit_bytes,
        points=points.within(limit_bytes, len(trials)) if sweep.strategy == "gp" else None,
        place=place,
    )


def _launched(trials: list[Trial]) -> int:
    """Trials that count against max_trials: those ruled out by their bound cost nothing."""
    return sum(t.reason_kind != "bound" for t in trials)


def _known(trial: Trial) -> Known:
    state = TrialState(trial.state)
    return Known(
        config=trial.config_json,
        latency_s=trial.latency_s,
        bound_bytes=trial.bound_bytes,
        peak_bytes=trial.peak_bytes,
        ended=state in TERMINAL,
        failed=state in (TrialState.FAILED, TrialState.CANCELLED)
        or (state is TrialState.PRUNED and trial.latency_s is None),
        out_of_memory=trial.reason_kind in (*OOM_KINDS, "bound", "peak"),
    )


def progress_of(database: Database, sweep_id: str) -> SweepProgress:
    """Where a sweep stands."""
    with database.reading() as session:
        sweep = SweepRepository(session).get(sweep_id)
        trials = TrialRepository(session).of_sweep(sweep_id)
    counts: dict[str, int] = {}
    for trial in trials:
        counts[trial.state] = counts.get(trial.state, 0) + 1
    done = [t for t in trials if t.state == TrialState.SUCCEEDED.value and t.latency_s is not None]
    best = min(done, key=lambda t: t.latency_s or 0.0, default=None)
    running = next((t for t in trials if t.state == TrialState.RUNNING.value), None)
    return SweepProgress(
        sweep_id=sweep_id,
        state=SweepState(sweep.state),
        reason=sweep.reason,
        counts=counts,
        total=max(len(trials), sweep.max_trials),
        best_latency_s=None if best is None else best.latency_s,
        best_config=None if best is None else best.config_json,
        running=None if running is None else running.config_json,
    )


def run_sweep(
    database: Database,
    sweep_id: str,
    executor: Executor,
    progress: Callable[[SweepProgress], None] | None = None,
    *,
    leases: Leases | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> SweepOutcome:
    """Run a sweep to its end with this executor, beside whoever else works on it.

    Trials of workers of this machine that are known to be dead are taken back at once; others when their
    lease runs out. A sweep that was killed and is run again repeats no finished trial. A paused sweep stays
    paused: resume it first.

    Args:
        progress: called after each step with where the sweep stands.
        stop: asked between and during trials; true leaves the sweep as it is, to be continued later.

    Raises:
        RuleError: no such sweep; its target does not fit here, or is other hardware; its operator or its spec
            cannot be read here.
    """
    from tuner.sweeping.worker import Worker

    with database.reading() as session:
        SweepRepository(session).get(sweep_id)
    worker = Worker(database, lambda: executor, sweep_id=sweep_id, leases=leases, progress=progress)
    worker.run(stop)
    with database.reading() as session:
        sweep = SweepRepository(session).get(sweep_id)
        counts = SweepRepository(session).counts(sweep_id)
    return SweepOutcome(sweep_id, SweepState(sweep.state), sweep.reason, counts)
