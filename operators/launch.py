"""Reads launch.json with the standard library alone, and holds a run to what was planned.

launch = read_launch("launch.json")
launch.check_tokens(tokens_per_rank)      # refuses N > N_max before anything is allocated
launch.check_hardware(local_hardware_id)  # says so if the figures were made for other hardware
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from operators.errors import RuleError

SCHEMA_VERSION = 1
_SCHEMA = Path(__file__).with_name("launch.schema.json")
_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}


class HardwareMismatch(UserWarning):
    """A launch file is used on hardware its figures were not made for."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The launch parameters of one plan (theory: D, E_p, P, N_max, c, K_max, n_t, β, s)."""

    sequence_degree: int
    expert_degree: int
    vocab_degree: int
    max_tokens_per_rank: int
    accumulation_steps: int
    chunk_tokens: int
    max_chunks: int
    dispatch_schedule: Literal["serial", "prefetch", "overlap"]
    alpha: float
    min_rows: int
    lambda_: float
    ring_mode: Literal["activations", "weights", "auto", "gather"]
    strip_rows: int
    host_budget_bytes: int
    optimizer_engine: Literal["device", "stream", "host", "split"]
    host_share: float
    bucket_params: int
    staging_slots: int
    placement: Literal["contiguous"]
    model: Mapping[str, Any]
    """The shape the plan was made for: hidden, layers, vocab, experts, top_k, and what else the file says."""
    hardware_id: str | None = None
    plan_id: str | None = None
    flatpeak_version: str | None = None

    def chunks(self, tokens: int) -> int:
        """K of Eq. 1 when the fullest rank of the group has ``tokens`` tokens."""
        return max(1, min(-(-tokens // self.chunk_tokens), self.max_chunks))

    def check_tokens(self, tokens: int) -> None:
        """Refuse a run with more tokens on a rank than the plan allows for.

        Raises:
            RuleError: ``tokens`` (N) is above ``max_tokens_per_rank`` (N_max).
        """
        if tokens > self.max_tokens_per_rank:
            raise RuleError(
                rule=f"tokens per rank N must not exceed the planned N_max = {self.max_tokens_per_rank}",
                value=tokens,
                remedy="The memory bound of the plan does not hold above N_max: cut the context or the "
                "micro-batch, spread the sequence over more ranks, or plan again for this N.",
            )

    def check_hardware(self, hardware_id: str) -> bool:
        """Whether the plan was made for this hardware. If not, a :class:`HardwareMismatch` warning says so."""
        if self.hardware_id is None or self.hardware_id == hardware_id:
            return self.hardware_id is not None
        warnings.warn(
            f"launch parameters were planned for hardware {self.hardware_id!r}, this is {hardware_id!r}: "
            "memory bounds hold for the same HBM, times do not. Probe this machine and plan again.",
            HardwareMismatch,
            stacklevel=2,
        )
        return False


def read_launch(path: str | Path) -> Launch:
    """Read and check a launch file.

    Raises:
        RuleError: the file is missing or no JSON, of another schema version, or a value breaks its rule. The
            rule begins with the JSON path of the value (``$.launch.chunk_tokens``).
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # no text, or no path at all
        raise RuleError(
            rule=f"a launch file must be readable text: {error}",
            value=str(path),
            remedy="Export one from a plan: flatpeak export --format launch.",
        ) from error
    try:
        body = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except RuleError:
        raise
    except (
        ValueError,
        RecursionError,
    ) as error:  # besides wrong JSON: numbers and nesting beyond Python's limits
        raise RuleError(
            rule=f"a launch file must be JSON: {error}",
            value=str(path),
            remedy="Export it again; do not edit it by hand.",
        ) from error
    return parse_launch(body)


def parse_launch(body: object) -> Launch:
    """Check the decoded content of a launch file.

    Raises:
        RuleError: as :func:`read_launch`.
    """
    # first of all: a file of another version breaks other rules too, and those messages would mislead
    if isinstance(body, dict) and body.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
        raise RuleError(
            rule=f"$.schema_version: this release reads version {SCHEMA_VERSION} of launch.json",
            value=body["schema_version"],
            remedy="Export the plan with the release that runs the job, or install the release that wrote it.",
        )
    if isinstance(body, dict) and "verdict" in body:
        raise RuleError(
            rule="$: a job reads the launch file of a plan, not the plan itself",
            value=str(body.get("id") or body["verdict"]),
            remedy="Export it: flatpeak export plan.json --format launch --output launch.json.",
        )
    _check(body, _schema(), "$")
    assert isinstance(body, dict)
    knobs = {name: _number(value) for name, value in body["launch"].items() if name != "schema_version"}
    model = {name: _number(value) for name, value in body["model"].items()}
    if model["top_k"] > model["experts"]:
        raise RuleError(
            rule=f"$.model.top_k: a token picks at most the {model['experts']} experts there are",
            value=model["top_k"],
            remedy="Correct top_k or experts.",
        )
    if model["experts"] % knobs["expert_degree"]:
        raise RuleError(
            rule=f"$.launch.expert_degree: it divides the number of experts ({model['experts']})",
            value=knobs["expert_degree"],
            remedy="Use a divisor.",
        )
    if knobs["host_share"] and knobs["optimizer_engine"] != "split":
        raise RuleError(
            rule="$.launch.host_share: it belongs to the optimizer engine split",
            value=f"{knobs['host_share']:g} with {knobs['optimizer_engine']}",
            remedy="Set optimizer_engine to split, or host_share to 0.",
        )
    return Launch(
        **{"lambda_" if name == "lambda" else name: value for name, value in knobs.items()},
        model=model,
        hardware_id=body.get("hardware_id"),
        plan_id=body.get("plan_id"),
        flatpeak_version=body.get("flatpeak_version"),
    )


def launch_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of launch.json."""
    schema: dict[str, Any] = json.loads(_SCHEMA.read_text(encoding="utf-8"))
    return schema


@cache
def _schema() -> dict[str, Any]:
    return launch_schema()


def _check(value: object, schema: Mapping[str, Any], path: str) -> None:
    """The part of JSON Schema that launch.schema.json uses."""
    if "const" in schema and not _equal(value, schema["const"]):
        _refuse(path, f"it is {schema['const']!r}", value)
    if "enum" in schema and value not in schema["enum"]:
        _refuse(path, f"it is one of {schema['enum']}", value)
    if "type" in schema:
        names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        if not any(_is(value, name) for name in names):
            _refuse(path, f"it is of type {' or '.join(names)}", value)
    if isinstance(value, float) and not math.isfinite(value):
        _refuse(path, "numbers are finite", value)  # 1e400 is JSON, and infinite in Python
    if isinstance(value, int | float):
        if value < schema.get("minimum", value):
            _refuse(path, f"it is at least {schema['minimum']}", value)
        if value > schema.get("maximum", value):
            _refuse(path, f"it is at most {schema['maximum']}", value)
        if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
            _refuse(path, f"it is above {schema['exclusiveMinimum']}", value)
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        for name in schema.get("required", ()):
            if name not in value:
                _refuse(f"{path}.{name}", "it has to be there", None)
        for name, inner in value.items():
            if name in properties:
                _check(inner, properties[name], f"{path}.{name}")
            elif schema.get("additionalProperties") is False:
                _refuse(f"{path}.{name}", "this release knows no such key", inner)


def _is(value: object, name: str) -> bool:
    if isinstance(value, bool):
        return False  # Python takes a bool for an int; JSON does not
    if name == "integer" and isinstance(value, float):
        return value.is_integer()  # 2.0 is an integer in JSON Schema
    return isinstance(value, _TYPES[name])


def _equal(value: object, const: object) -> bool:
    return value == const and isinstance(value, bool) == isinstance(const, bool)


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _refuse(path: str, rule: str, value: object) -> None:
    raise RuleError(
        rule=f"{path}: {rule}",
        value=value,
        remedy="Export the plan again, or correct the value; operators/launch.schema.json has the rules.",
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            _refuse(f"$..{name}", "a key appears once", value)
        found[name] = value
    return found


def _refuse_constant(name: str) -> float:
    _refuse("$", "numbers are finite", name)
    return 0.0
