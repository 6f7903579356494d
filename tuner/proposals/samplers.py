"""The next point of a sweep. Our rows are the truth; what a sampler knows is rebuilt from them each time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import optuna
import torch
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import FrozenTrial, create_trial
from optuna.trial import TrialState as StudyState

from tuner.proposals.gp import ListedGPSampler
from tuner.space import Config, Knob, Space, config_id

optuna.logging.set_verbosity(optuna.logging.WARNING)

_STARTUP_TRIALS = 6
MOST_LISTED = 4096
"""Spellings of a space that are looked through; of a larger one so many are drawn."""
_ASKS = 24
"""A sampler may ask for a point again; TPE draws anew each time."""
Place = Callable[[Config], Config | None]
"""A point in its one spelling, or None where it must not be proposed."""
_TOLD_OUT = 0.1
"""Constraint of a point that ran out of memory where nobody knows by how much."""


@dataclass(frozen=True, slots=True)
class Known:
    """A trial as a sampler is told of it.

    Attributes:
        latency_s: measured, or None.
        bound_bytes, peak_bytes: Eq. 6 and the measured peak, as far as known.
        ended: it has its answer; a live one is told as running, so that its place is not proposed again.
        failed: it ended without saying anything about its point.
    """

    config: Config
    latency_s: float | None
    bound_bytes: int | None
    peak_bytes: int | None
    ended: bool
    failed: bool = False
    out_of_memory: bool = False


def propose(
    strategy: str,
    space: Space,
    known: Sequence[Known],
    *,
    seed: int,
    limit_bytes: int,
    points: Sequence[Config] | None = None,
    place: Place = lambda config: config,
) -> Config | None:
    """A point that is not known yet, or None when there is none left.

    In a space of more than ``MOST_LISTED`` spellings that many drawn ones without a new point are taken for none left.

    Args:
        strategy: ``grid``, ``random``, ``tpe`` or ``gp``.
        points: for ``gp``, which is asked about every point anyway: those that exist and that Eq. 6 lets through,
            or some of them; without it, all of the space. TPE draws from the whole space and is told what Eq. 6
            refuses.
        place: asked about whatever ``tpe`` draws.
    """
    taken = {config_id(k.config) for k in known}
    if strategy == "grid":
        return _first_new(space.grid(), taken)
    if strategy == "random":
        return _first_new(space.shuffled(seed), taken)
    with _one_thread():
        if strategy == "tpe":
            return _ask_tpe(space, known, taken, place=place, seed=seed, limit_bytes=limit_bytes)
        return _ask_gp(space, known, taken, points, seed=seed, limit_bytes=limit_bytes)


def _ask_gp(
    space: Space,
    known: Sequence[Known],
    taken: set[str],
    points: Sequence[Config] | None,
    *,
    seed: int,
    limit_bytes: int,
) -> Config | None:
    free = [c for c in (space.grid() if points is None else points) if config_id(c) not in taken]
    draw = random.Random(seed + len(known))
    if sum(k.ended and not k.failed for k in known) < _STARTUP_TRIALS or not free:
        return _drawn(space, free, draw) if free else None
    listed = [_params(space, config)[0] for config in free]
    sampler = ListedGPSampler(listed, seed=seed + len(known), n_startup_trials=_STARTUP_TRIALS)
    chosen = _study(sampler, space, known, limit_bytes).ask().relative_params
    # knobs that only some points have are no part of its surrogate: any point with the chosen ones will do
    alike = [
        config
        for config, params in zip(free, listed, strict=True)
        if all(params.get(name) == value for name, value in chosen.items())
    ]
    return draw.choice(alike or free)


def _drawn(space: Space, free: Sequence[Config], draw: random.Random) -> Config:
    """One of the points, knob by knob: a word with few points is as likely as one with many."""
    left = list(free)
    for knob in space.knobs:
        value = draw.choice(list(dict.fromkeys(config.get(knob.name) for config in left)))
        left = [config for config in left if config.get(knob.name) == value]
    return left[0]


def _ask_tpe(
    space: Space,
    known: Sequence[Known],
    taken: set[str],
    *,
    place: Place,
    seed: int,
    limit_bytes: int,
) -> Config | None:
    sampler = TPESampler(seed=seed + len(known), n_startup_trials=_STARTUP_TRIALS)
    study = _study(sampler, space, known, limit_bytes)
    for _ in range(_ASKS):
        trial = study.ask()
        config: Config = {}
        for knob in space.knobs:
            if knob.active(config):
                config[knob.name] = knob.values[_suggest(trial, knob)]
        point = place(config)
        if point is not None and config_id(point) not in taken:
            return point
        study.tell(trial, state=StudyState.FAIL)
    placed = (place(config) for config in spellings(space, seed, len(known)))
    return _first_new((point for point in placed if point is not None), taken)


def spellings(space: Space, seed: int, turn: int) -> Iterator[Config]:
    """All of a space in an order of the seed; of a large one ``MOST_LISTED`` drawn ones, others at each turn."""
    if space.size <= MOST_LISTED:
        yield from space.shuffled(seed)
        return
    draw = random.Random(seed + turn)
    for _ in range(MOST_LISTED):
        yield space.canonical({knob.name: draw.choice(knob.values) for knob in space.knobs})


def _study(sampler: BaseSampler, space: Space, known: Sequence[Known], limit_bytes: int) -> optuna.Study:
    study = optuna.create_study(sampler=sampler, direction="minimize")
    for one, told in zip(known, told_constraints(known, limit_bytes), strict=True):
        study.add_trial(_told(space, one, known, told))
    return study


@contextmanager
def _one_thread() -> Iterator[None]:
    """A sampler's matrices are tiny, and ranks want the cores: more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _first_new(points: Iterable[Config], taken: set[str]) -> Config | None:
    return next((point for point in points if config_id(point) not in taken), None)


def _distribution(knob: Knob) -> BaseDistribution:
    """Values are told by their place in the knob's list: bytes and counts grow in ratios, not in steps."""
    if knob.kind == "ordered":
        return IntDistribution(0, len(knob.values) - 1)
    return CategoricalDistribution(list(range(len(knob.values))))


def _suggest(trial: optuna.Trial, knob: Knob) -> int:
    if knob.kind == "ordered":
        return trial.suggest_int(knob.name, 0, len(knob.values) - 1)
    return int(trial.suggest_categorical(knob.name, list(range(len(knob.values)))))


def told_constraints(known: Sequence[Known], limit_bytes: int) -> list[dict[str, float]]:
    """What every trial breaks of the memory limit: positive where it does, one dictionary a trial.

    All trials get the same constraints (Optuna's Gaussian process insists). One that every trial keeps is left out:
    it would cost a fit at every proposal and keep nothing away.
    """
    every = [
        {
            "bound": -1.0 if one.bound_bytes is None else one.bound_bytes / limit_bytes - 1.0,
            "peak": -1.0 if one.peak_bytes is None else one.peak_bytes / limit_bytes - 1.0,
        }
        for one in known
    ]
    for one, told in zip(known, every, strict=True):
        if one.out_of_memory:
            told["peak"] = max(told["peak"], told["bound"], _TOLD_OUT)
    speaking = [name for name in ("bound", "peak") if max((t[name] for t in every), default=-1.0) > 0.0]
    return [{name: told[name] for name in speaking} for told in every]


def _told(space: Space, one: Known, known: Sequence[Known], constraints: Mapping[str, float]) -> FrozenTrial:
    params, distributions = _params(space, one.config)
    if not one.ended:
        return create_trial(state=StudyState.RUNNING, params=params, distributions=distributions)
    if one.failed:
        return create_trial(state=StudyState.FAIL, params=params, distributions=distributions)
    value = one.latency_s if one.latency_s is not None else expected_latency_s(space, one.config, known)
    # Latencies span decades, and a Gaussian process wants one scale: their logarithms are told.
    # Told as failed, an infeasible point teaches nothing and the sampler walks back to it: it is told as complete,
    # with constraints above zero.
    return create_trial(
        value=math.log(value), params=params, distributions=distributions, constraints=dict(constraints)
    )


def _params(space: Space, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
    params: dict[str, Any] = {}
    distributions: dict[str, BaseDistribution] = {}
    for knob in space.knobs:
        if knob.name in config and config[knob.name] in knob.values:
            params[knob.name] = knob.values.index(config[knob.name])
            distributions[knob.name] = _distribution(knob)
    return params, distributions


def expected_latency_s(space: Space, config: Config, known: Sequence[Known]) -> float:
    """Latency of a point that was not measured, from its measured neighbours (1 s when there are none)."""
    measured = [k for k in known if k.latency_s is not None]
    if not measured:
        return 1.0
    place = _params(space, config)[0]

    def distance(other: Known) -> float:
        there = _params(space, other.config)[0]
        total = 0.0
        for knob in space.knobs:
            here, away = place.get(knob.name), there.get(knob.name)
            if here == away:
                continue
            near = knob.kind == "ordered" and here is not None and away is not None
            total += abs(here - away) / (len(knob.values) - 1) if near and here is not None else 1.0
        return total

    nearest = min(distance(k) for k in measured)
    return median(k.latency_s for k in measured if k.latency_s is not None and distance(k) <= nearest + 1e-9)
