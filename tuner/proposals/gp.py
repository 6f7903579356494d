"""Optuna's Gaussian process over the points of a space, not over a box around them.

``GPSampler`` climbs its acquisition function through a continuous box and rounds: over half of a proposal's time,
and often to a point that is known already. A space of launch parameters is a short list, so here the function is
evaluated at every point that is still open, and the best one is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from optuna._gp.acqf import BaseAcquisitionFunc
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import GPSampler
from optuna.study import Study
from optuna.trial import FrozenTrial

Array = npt.NDArray[np.float64]


class ListedGPSampler(GPSampler):
    """A ``GPSampler`` that proposes one of ``points`` wherever its surrogate proposes at all.

    Args:
        points: parameters (by name, as the study is told of them) of the points that may be proposed.
    """

    def __init__(self, points: Sequence[Mapping[str, int]], *, seed: int, n_startup_trials: int) -> None:
        super().__init__(seed=seed, n_startup_trials=n_startup_trials, warn_independent_sampling=False)
        self._points = points
        self._asked: dict[str, BaseDistribution] = {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        self._asked = search_space
        return super().sample_relative(study, trial, search_space)

    def _optimize_acqf(self, acqf: BaseAcquisitionFunc, best_params: Array | None) -> Array:
        listed = [point for point in self._points if self._asked.keys() <= point.keys()]
        if not listed:
            return super()._optimize_acqf(acqf, best_params)
        columns = [_place(listed, name, distribution) for name, distribution in self._asked.items()]
        places = np.unique(np.stack(columns, axis=1), axis=0)
        values = acqf.eval_acqf_no_grad(places)
        best: Array = places[int(np.argmax(values))]
        return best


def _place(points: Sequence[Mapping[str, int]], name: str, distribution: BaseDistribution) -> Array:
    """A parameter of all points, as the sampler's Gaussian process has it: words by number, the rest within [0, 1]."""
    values = np.array([float(point[name]) for point in points])
    if isinstance(distribution, CategoricalDistribution):
        return values
    assert isinstance(distribution, IntDistribution)
    return (values - distribution.low + 0.5) / (distribution.high - distribution.low + 1)
