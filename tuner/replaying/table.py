"""A recorded sweep as a table: what every configuration took and needed, from rows in the samples' columns."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cost_model.errors import RuleError
from cost_model.samples import slowest, with_ranks
from tuner.measuring.modes import split_modes
from tuner.registry import load_adapter, operator_names
from tuner.space import Config, Knob, Space, config_id
from tuner.sweeping.point_bound import bound_terms

_NEEDED = ("operator", "provider", "config_json", "shape_json", "pass", "rank", "repeat", "seconds")
_UNSET = "default"
_HALVES = frozenset({"forward", "backward"})
# Benchmarks of one rank at the true shape of a group name things their own way.
_OTHER_NAMES = {"tokens": "tokens_per_rank", "vocab_ranks": "ranks", "expert_ranks": "ranks"}


@dataclass(frozen=True, slots=True)
class Recorded:
    """One configuration of a table.

    Attributes:
        repeats: seconds of the slowest rank in each repeat, by pass, in the order they were taken.
        peak_bytes: largest allocation over ranks, passes and repeats; None where it was not recorded.
        bound_bytes: Eq. 6, None where the operator cannot tell for this shape.
    """

    config: Config
    repeats: Mapping[str, tuple[float, ...]]
    peak_bytes: int | None
    bound_bytes: int | None

    @property
    def seconds(self) -> dict[str, float]:
        """Median of the fast mode by pass."""
        return {name: split_modes(times).fast_s for name, times in self.repeats.items()}

    @property
    def latency_s(self) -> float:
        """Passes added."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Table:
    """An exhaustive sweep of one operator and shape on one kind of hardware."""

    operator: str
    provider: str
    shape: Mapping[str, Any]
    ranks: int
    hardware_id: str
    space: Space
    points: tuple[Recorded, ...]

    @property
    def name(self) -> str:
        """Operator and sizes, short enough for a heading."""
        sizes = " ".join(f"{key}={value}" for key, value in sorted(self.shape.items()))
        return f"{self.operator} ({self.provider}) {sizes}"

    def find(self, config: Config) -> Recorded | None:
        """The row of a configuration."""
        return self._by_id.get(config_id(config))

    @cached_property
    def _by_id(self) -> dict[str, Recorded]:
        return {config_id(point.config): point for point in self.points}


def read_samples(path: Path) -> pd.DataFrame:
    """Rows of a CSV file in the samples' columns.

    Raises:
        RuleError: the file cannot be read, or lacks columns.
    """
    try:
        samples = pd.read_csv(path)
    except (OSError, ValueError, EOFError) as error:
        raise RuleError(
            rule="a recorded sweep is a CSV file that can be read", value=str(path), remedy=_unread(error)
        ) from error
    if missing := [name for name in _NEEDED if name not in samples.columns]:
        raise RuleError(
            rule=f"a recorded sweep has the columns {', '.join(_NEEDED)}",
            value=missing,
            remedy="Write rows as `flatpeak sweep` stores them.",
        )
    return samples


def _unread(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"Check the path ({error.strerror})."
    if isinstance(error, pd.errors.EmptyDataError):
        return "The file is empty: give one with a header and rows."
    return "The file is no text of comma-separated values: give rows as `flatpeak sweep` stores them."


def tables(samples: pd.DataFrame, *, fewest: int = 2, where: Mapping[str, str] | None = None) -> list[Table]:
    """The tables in ``samples``: one per operator, provider, shape, group size and hardware with ``fewest`` points or
    more.

    A configuration without a finite time is left out.

    Args:
        where: knob to value, as text: only configurations that have it.

    Raises:
        RuleError: a row's JSON cannot be read.
    """
    rows = samples.copy()
    if "hardware_id" not in rows:
        rows["hardware_id"] = "unknown"
    seconds = rows["seconds"].astype(float)
    rows = rows[np.isfinite(seconds) & (seconds > 0)]
    for key, value in (where or {}).items():
        rows = rows[[str(json_object(str(text)).get(key)) == value for text in rows["config_json"]]]
    found = []
    rows = _with_ranks(rows)
    keys = ["operator", "provider", "shape_json", "hardware_id", "ranks"]
    for group, own in rows.groupby(keys, sort=True):
        operator, provider, shape, hardware, ranks = (str(part) for part in group)
        table = _table(operator, provider, {**json_object(shape), "ranks": int(ranks)}, hardware, own)
        if len(table.points) >= fewest:
            found.append(table)
    return found


def _with_ranks(rows: pd.DataFrame) -> pd.DataFrame:
    """One rank may stand for a whole group (its peers are local copies): the group's size is in its shape."""
    known = {str(text): json_object(str(text)) for text in rows["shape_json"].unique()}
    spelt = {t: {_OTHER_NAMES.get(k, k): v for k, v in one.items()} for t, one in known.items()}
    texts = [json.dumps(spelt[str(text)], sort_keys=True) for text in rows["shape_json"]]
    return with_ranks(rows.assign(shape_json=texts))


def _table(operator: str, provider: str, shape: dict[str, Any], hardware: str, rows: pd.DataFrame) -> Table:
    group = int(shape.pop("ranks"))
    points = []
    for text, own in rows.groupby("config_json", sort=True):
        config = {k: v for k, v in json_object(str(text)).items() if k not in _OTHER_NAMES}
        repeats = {str(name): _slowest(part) for name, part in own.groupby("pass", sort=False)}
        if repeats.keys() >= _HALVES:
            repeats = {name: repeats[name] for name in ("forward", "backward")}
        elif len(repeats) > 1:  # forward alone beside both together
            whole = next((n for n in ("forward_backward", "step") if n in repeats), next(iter(repeats)))
            repeats = {whole: repeats[whole]}
        points.append((config, repeats, _peak(own)))
    kept = _once(points)
    space = _space([config for config, _, _ in kept])
    bounds = _Bounds(operator, provider, shape, group, device=_device(rows))
    recorded = tuple(
        Recorded(_complete(space, config), repeats, peak, bounds.bound(config))
        for config, repeats, peak in kept
    )
    return Table(operator, provider, shape, group, hardware, space, recorded)


_Point = tuple[Config, dict[str, tuple[float, ...]], int | None]


def _once(points: Sequence[_Point]) -> list[_Point]:
    """Points once each (the first of a spelling), in a fixed order."""
    distinct: dict[str, _Point] = {}
    for point in points:
        distinct.setdefault(config_id(point[0]), point)
    return [
        distinct[key] for key in sorted(distinct, key=lambda k: json.dumps(distinct[k][0], sort_keys=True))
    ]


def _slowest(rows: pd.DataFrame) -> tuple[float, ...]:
    return tuple(slowest(rows))


def _peak(rows: pd.DataFrame) -> int | None:
    if "allocated_bytes" not in rows:
        return None
    peak = rows["allocated_bytes"].astype(float).max()
    return int(peak) if math.isfinite(peak) and peak > 0 else None


def _device(rows: pd.DataFrame) -> str:
    return "cuda" if "peak_source" in rows and (rows["peak_source"] == "cuda").any() else "cpu"


def json_object(text: str) -> dict[str, Any]:
    """What a row's shape_json or config_json holds.

    Raises:
        RuleError: it is no JSON object.
    """
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise RuleError(
            rule="shape_json and config_json hold JSON objects",
            value=text,
            remedy=f"Correct the row: {error}.",
        ) from error
    if not isinstance(found, dict):
        raise RuleError(
            rule="shape_json and config_json hold JSON objects", value=text, remedy="Correct the row."
        )
    return found


def _space(configs: Sequence[Config]) -> Space:
    """Knobs with the values that were recorded; numbers are ordered, everything else is a word."""
    names = list(dict.fromkeys(name for config in configs for name in config))
    names.sort(key=lambda name: -sum(name in config for config in configs))
    knobs: list[Knob] = []
    for name in names:
        values = list(dict.fromkeys(c[name] for c in configs if name in c))
        when = _when(name, knobs, configs)
        if when is None:
            values.append(_UNSET)
        ordered = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        if ordered:
            values.sort(key=float)
        knobs.append(Knob(name, tuple(values), "ordered" if ordered else "categorical", when or {}))
    return Space(tuple(knobs))


def _when(name: str, earlier: Sequence[Knob], configs: Sequence[Config]) -> dict[str, tuple[Any, ...]] | None:
    """The values of one earlier knob under which ``name`` appears; None when none explains where it is left out."""
    if all(name in config for config in configs):
        return {}
    for knob in earlier:
        having = {config.get(knob.name) for config in configs if name in config}
        lacking = {config.get(knob.name) for config in configs if name not in config}
        if not having & lacking:
            return {knob.name: tuple(v for v in knob.values if v in having)}
    return None


def _complete(space: Space, config: Config) -> Config:
    """The configuration with every knob that its others leave open."""
    filled: Config = {}
    for knob in space.knobs:
        if knob.active(filled):
            filled[knob.name] = config.get(knob.name, _UNSET)
    return filled


class _Bounds:
    """Eq. 6 of a table's points, as far as its operator is known and takes the shape."""

    def __init__(
        self, operator: str, provider: str, shape: Mapping[str, Any], ranks: int, *, device: str
    ) -> None:
        self._adapter = load_adapter(operator) if operator in operator_names() else None
        self._provider, self._ranks, self._device = provider, ranks, device
        self._shape: dict[str, Any] = {}
        if self._adapter is None or provider not in self._adapter.providers:
            self._adapter = None
            return
        for keys in _subsets(shape):
            try:
                self._shape = self._adapter.shape(keys, ranks)
            except RuleError:
                continue
            return
        self._adapter = None

    def bound(self, config: Config) -> int | None:
        if self._adapter is None:
            return None
        try:
            terms = bound_terms(
                self._adapter,
                self._shape,
                config,
                self._ranks,
                provider=self._provider,
                device=self._device,
            )
            return sum(terms.values())
        except (RuleError, KeyError, ValueError):
            return None


def _subsets(shape: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The shape, then without what benchmarks note beside it."""
    yield dict(shape)
    yield {
        k: v for k, v in shape.items() if k not in ("group", "resident_bytes", "ranks", "nodes", "loopback")
    }
