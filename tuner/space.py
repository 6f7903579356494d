"""Search spaces: knobs, their values, and one identity for a configuration."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cost_model.errors import RuleError

Scalar = str | int | float | bool
Config = dict[str, Scalar]


@dataclass(frozen=True, slots=True)
class Knob:
    """One launch parameter that a sweep varies.

    Attributes:
        values: every value it may take, in the order they are enumerated.
        kind: ``ordered`` values have a size (chunks, bytes), ``categorical`` ones do not.
        when: other knobs and the values of theirs under which this one has a meaning. Elsewhere it is left
            out of the configuration, so that two spellings of one point are one point.
    """

    name: str
    values: tuple[Scalar, ...]
    kind: Literal["categorical", "ordered"] = "categorical"
    when: Mapping[str, tuple[Scalar, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.values:
            raise RuleError(
                rule="a knob needs at least one value",
                value=self.name,
                remedy="List values, or leave the knob out.",
            )
        if self.kind == "ordered" and any(isinstance(v, str | bool) for v in self.values):
            raise RuleError(
                rule=f"values of the ordered knob {self.name} must be numbers",
                value=list(self.values),
                remedy="Write plain numbers.",
            )

    def active(self, config: Mapping[str, Scalar]) -> bool:
        """Whether the knob means anything beside the other values of ``config``."""
        return all(config.get(name) in allowed for name, allowed in self.when.items())


@dataclass(frozen=True, slots=True)
class Space:
    """Knobs, in an order in which each stands after those that its ``when`` names."""

    knobs: tuple[Knob, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for knob in self.knobs:
            late = [name for name in knob.when if name not in seen]
            if knob.name in seen or late:
                raise RuleError(
                    rule="knobs have different names and stand after the knobs they depend on",
                    value=knob.name,
                    remedy="Rename or reorder the knobs.",
                )
            seen.add(knob.name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(knob.name for knob in self.knobs)

    @property
    def size(self) -> int:
        """Combinations of all values: at least as many as there are points."""
        return math.prod(len(knob.values) for knob in self.knobs)

    def knob(self, name: str) -> Knob:
        """The knob of this name.

        Raises:
            RuleError: there is none.
        """
        for knob in self.knobs:
            if knob.name == name:
                return knob
        raise RuleError(
            rule="a sweep varies the operator's own knobs",
            value=name,
            remedy=f"Choose among {list(self.names)}."
            if self.knobs
            else "There are none with this provider: leave space out.",
        )

    def canonical(self, config: Mapping[str, Scalar]) -> Config:
        """``config`` in the order of the knobs, without the ones that mean nothing in it."""
        kept: Config = {}
        for knob in self.knobs:
            if knob.name in config and knob.active(kept):
                kept[knob.name] = config[knob.name]
        return kept

    def check(self, config: Mapping[str, Scalar]) -> Config:
        """The canonical form of a complete, legal configuration.

        Raises:
            RuleError: an unknown knob, a value outside its list, a knob left out.
        """
        for name in config:
            self.knob(name)
        kept = self.canonical(config)
        for knob in self.knobs:
            if not knob.active(kept):
                continue
            if knob.name not in kept:
                raise RuleError(
                    rule="a configuration gives every active knob a value",
                    value=dict(config),
                    remedy=f"Add {knob.name}, one of {list(knob.values)}.",
                )
            if kept[knob.name] not in knob.values:
                raise RuleError(
                    rule=f"{knob.name} takes the values of its list",
                    value=kept[knob.name],
                    remedy=f"Choose one of {list(knob.values)}.",
                )
        return kept

    def narrowed(self, choices: Mapping[str, Sequence[Scalar]]) -> Space:
        """The same knobs with the values of ``choices``; knobs that it does not name keep theirs.

        Raises:
            RuleError: an unknown knob, or an empty list.
        """
        for name in choices:
            self.knob(name)
        return Space(
            tuple(
                Knob(k.name, _distinct(choices[k.name]) if k.name in choices else k.values, k.kind, k.when)
                for k in self.knobs
            )
        )

    def grid(self) -> Iterator[Config]:
        """Every point once, the last knob varying fastest."""
        seen: set[str] = set()
        for values in itertools.product(*(knob.values for knob in self.knobs)):
            config = self.canonical(dict(zip(self.names, values, strict=True)))
            if (identity := config_id(config)) not in seen:
                seen.add(identity)
                yield config

    def shuffled(self, seed: int) -> list[Config]:
        """Every point once, in an order drawn with ``seed``."""
        points = list(self.grid())
        random.Random(seed).shuffle(points)
        return points


def _distinct(values: Sequence[Scalar]) -> tuple[Scalar, ...]:
    return tuple(dict.fromkeys(values))


def config_id(config: Mapping[str, Scalar]) -> str:
    """Identity of a configuration: equal for equal knobs and values, in whatever order they stand."""
    plain = {name: _plain(value) for name, value in config.items()}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def _plain(value: Scalar) -> Scalar:
    """4.0 and 4 are one value, in JSON as in YAML."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
