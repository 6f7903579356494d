"""Readers of the shipped files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from io import StringIO
from typing import Any

import pandas as pd

from cost_model.errors import RuleError

SAMPLE_COLUMNS = (
    "operator",
    "provider",
    "config_json",
    "shape_json",
    "pass",
    "rank",
    "repeat",
    "seconds",
    "allocated_bytes",
    "reserved_bytes",
    "peak_source",
    "hardware_id",
    "operator_version",
    "commit",
    "source",
)
_SAMPLE_FILES = ("samples.csv", "samples_h200_x1.csv", "samples_h200_x2.csv")


@dataclass(frozen=True, slots=True)
class Curve:
    """A measured curve: ``points`` of (x, y), x in ``x_unit``, y in ``unit``."""

    name: str
    unit: str
    x_unit: str
    points: tuple[tuple[float, float], ...]
    note: str


def load_samples() -> pd.DataFrame:
    """All shipped samples under ``SAMPLE_COLUMNS``; what was not measured is NaN, times in s, peaks in bytes."""
    frames = [pd.read_csv(StringIO(_text(name)), keep_default_na=True) for name in _SAMPLE_FILES]
    return pd.concat(frames, ignore_index=True)[list(SAMPLE_COLUMNS)]


def known_hardware() -> tuple[str, ...]:
    """Fingerprints that rates are shipped for."""
    return tuple(_machines())


def load_rates(hardware_id: str) -> dict[str, Curve]:
    """Measured curves of one kind of node, by name.

    Raises:
        RuleError: nothing was measured on this hardware; another's figures are never given instead.
    """
    entry = _machines().get(hardware_id)
    if entry is None:
        raise RuleError(
            rule="reference rates are known for measured hardware only",
            value=hardware_id,
            remedy=f"Known: {', '.join(known_hardware())}. Measure this machine with `flatpeak probe`.",
        )
    return {
        curve["name"]: Curve(
            curve["name"],
            curve["unit"],
            curve["x_unit"],
            tuple((float(x), float(y)) for x, y in curve["points"]),
            curve["note"],
        )
        for curve in entry
    }


def load_public_cases() -> list[dict[str, Any]]:
    """Memory and limits that public reports state, each with its source: what formulas are checked against."""
    cases: list[dict[str, Any]] = json.loads(_text("public_cases.json"))
    return cases


@lru_cache(maxsize=1)
def _machines() -> dict[str, list[dict[str, Any]]]:
    machines: dict[str, list[dict[str, Any]]] = json.loads(_text("rates.json"))["machines"]
    return machines


def _text(name: str) -> str:
    return files("cost_model.reference").joinpath(name).read_text(encoding="utf-8")
