"""A sweep as a user writes it, in YAML or JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from cost_model.errors import RuleError
from cost_model.field_rules import NumberFields, sentence
from cost_model.text_file import read_text, unstorable
from tuner.executors.base import Timers
from tuner.space import Scalar

Strategy = Literal["grid", "random", "tpe", "gp", "model"]
_MAX_FILE_BYTES = 1_000_000
_MOST_SECONDS = 30 * 86_400
_Allowance = Annotated[float, Field(gt=0, le=_MOST_SECONDS)]


class _Strict(NumberFields):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Target(_Strict):
    """What a sweep runs on: so many ranks of a device, on one kind of hardware or on any.

    Ranks stand on one node, or evenly on ``nodes`` of them: contiguous ranks, node by node. With ``loopback`` one
    rank plays its part in a group of so many that are not there: what peers would send are local copies of the
    right size, so memory and compute are true and link time is absent.
    """

    ranks: int = Field(ge=1, le=4096)
    nodes: int = Field(default=1, ge=1, le=512)
    loopback: int | None = Field(default=None, ge=2, le=4096)
    device: Literal["cpu", "cuda"] = "cpu"
    hardware_id: str | None = Field(default=None, max_length=128)

    @property
    def group_size(self) -> int:
        """Ranks of the group that the operator talks through."""
        return self.loopback or self.ranks

    @model_validator(mode="after")
    def _nodes_are_equally_full(self) -> Self:
        if self.ranks % self.nodes:
            raise ValueError(f"{self.ranks} ranks do not divide over {self.nodes} nodes")
        if self.loopback is not None and self.ranks != 1:
            raise ValueError(f"loopback is one rank's part of a group: ranks must be 1, not {self.ranks}")
        return self


class TimerSpec(_Strict):
    """Allowances in seconds; see :class:`tuner.executors.base.Timers`."""

    start_s: _Allowance = 120.0
    run_s: _Allowance = 1800.0
    stall_s: _Allowance = 120.0
    cancel_s: _Allowance = 5.0
    place_s: _Allowance = 600.0

    def timers(self) -> Timers:
        return Timers(self.start_s, self.run_s, self.stall_s, self.cancel_s, self.place_s)


class SweepSpec(_Strict):
    """The operator, where, which shape, over which values, chosen how."""

    operator: str = Field(min_length=1, max_length=200)
    provider: str = Field(default="flatpeak", max_length=64)
    name: str = Field(default="", max_length=200)
    target: Target
    shape: Annotated[dict[str, Any], Field(max_length=64)]
    space: Annotated[
        dict[str, Annotated[list[Scalar], Field(min_length=1, max_length=1000)]],
        Field(max_length=32, description="Knob to its values; one value may stand without its list"),
    ] = Field(default_factory=dict)
    strategy: Strategy = "grid"
    repeats: int = Field(default=3, ge=3, le=1000)
    max_trials: int = Field(default=1000, ge=1, le=100_000)
    memory_limit_bytes: int | None = Field(default=None, ge=1, le=2**50)
    seed: int = Field(default=0, ge=0, lt=2**31)
    prune: bool | None = None
    timers: TimerSpec = Field(default_factory=TimerSpec)

    @property
    def group_shape(self) -> dict[str, Any]:
        """The shape as samples keep it: with loopback the group's size belongs to it, and that nobody was there;
        over several nodes, how many there were."""
        if self.target.loopback is not None:
            return {**self.shape, "ranks": self.target.loopback, "loopback": True}
        if self.target.nodes > 1:
            return {**self.shape, "ranks": self.target.ranks, "nodes": self.target.nodes}
        return self.shape

    @property
    def prunes(self) -> bool:
        """Points that cannot reach the front any more are stopped after a repeat; by default where points are
        chosen for the recommendation's sake (``model``), not where all are wanted."""
        return self.strategy == "model" if self.prune is None else self.prune

    @field_validator("space", mode="before")
    @classmethod
    def _one_value_is_a_list(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {k: v if isinstance(v, list) else [v] for k, v in value.items()}
        return value

    @model_validator(mode="before")
    @classmethod
    def _storable(cls, data: object) -> object:
        if (bad := unstorable(data)) is not None:
            raise ValueError(f"text must not hold {bad}")
        return data


def parse_sweep(data: object) -> SweepSpec:
    """A sweep from parsed YAML or JSON.

    Raises:
        RuleError: the first thing that is wrong, with its place.
    """
    try:
        return SweepSpec.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise RuleError(
            rule=sentence(first, "the sweep"),
            value=first["input"],
            remedy="Correct it; docs/sweeps.md lists the keys of a sweep file.",
        ) from error


def read_sweep_file(path: str | Path) -> SweepSpec:
    """A sweep from a YAML or JSON file.

    Raises:
        RuleError: the file cannot be read, is too large, or does not describe a sweep.
    """
    path = Path(path)
    try:
        text = read_text(path, _MAX_FILE_BYTES)
        data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise RuleError(
            rule="a sweep file must be readable text", value=str(path), remedy=f"Check the path: {error}."
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: JSON, or an endless number
        raise RuleError(
            rule="a sweep file must be YAML or JSON", value=str(path), remedy=f"Correct it: {error}"
        ) from error
    return parse_sweep(data)
