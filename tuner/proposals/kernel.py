"""How alike two points of a space are: near values of ordered knobs much, other words less."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tuner.space import Scalar, Space

_OTHER_WORD = 0.5


class KnobKernel:
    """Matérn 3/2 over the ordered knobs, times a factor for every categorical knob that differs.

    Ordered values stand at their logarithm (zero stands with the smallest one), scaled so that the candidates span
    [0, 1]: counts and bytes act in ratios.
    """

    def __init__(self, space: Space, configs: Sequence[Mapping[str, Scalar]]) -> None:
        self._words = [knob.name for knob in space.knobs if knob.kind == "categorical"]
        self._scales: dict[str, tuple[float, float, float]] = {}
        for knob in space.knobs:
            if knob.kind != "ordered":
                continue
            values = [float(c[knob.name]) for c in configs if knob.name in c]
            values = values or [float(v) for v in knob.values]
            least = min((v for v in values if v > 0), default=1.0) / 2
            logs = [math.log(max(v, least)) for v in values]
            self._scales[knob.name] = (least, min(logs), max(max(logs) - min(logs), 1e-9))

    def places(self, points: Sequence[Mapping[str, Any]]) -> npt.NDArray[np.float64]:
        """Ordered knobs within [-1/2, 1/2], 0 where a point has none of one, and 0 or 1 for every word; [n, d]."""
        columns = [
            [(math.log(max(float(p[name]), least)) - low) / span - 0.5 if name in p else 0.0 for p in points]
            for name, (least, low, span) in self._scales.items()
        ]
        for name in self._words:
            words = [str(p.get(name, "")) for p in points]
            columns += [[0.5 * (word == one) for word in words] for one in sorted(set(words))]
        return np.array(columns, dtype=np.float64).reshape(len(columns), len(points)).T

    def matrix(
        self, points: Sequence[Mapping[str, Any]], reach: float, rows: npt.NDArray[np.intp] | None = None
    ) -> npt.NDArray[np.float64]:
        """Correlations of the pairs of ``rows`` (all by default) with all points, [rows, n].

        Args:
            reach: distance, in the whole range of a knob, over which points stay alike.
        """
        some = np.arange(len(points)) if rows is None else rows
        squared = np.zeros((len(some), len(points)))
        alike = np.ones_like(squared)
        for name, (least, low, span) in self._scales.items():
            places = np.array(
                [
                    (math.log(max(float(p[name]), least)) - low) / span if name in p else math.nan
                    for p in points
                ]
            )
            away = places[some, None] - places[None, :]
            absent = np.isnan(places)
            alike = np.where(absent[some, None] != absent[None, :], alike * _OTHER_WORD, alike)
            squared += np.nan_to_num(away) ** 2
        for name in self._words:
            words = np.array([str(p.get(name, "")) for p in points])
            alike = np.where(words[some, None] == words[None, :], alike, alike * _OTHER_WORD)
        scaled = math.sqrt(3.0) * np.sqrt(squared) / reach
        matrix: npt.NDArray[np.float64] = alike * (1.0 + scaled) * np.exp(-scaled)
        return matrix
