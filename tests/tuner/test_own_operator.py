"""The example of an operator of one's own does what an operator of ours does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.own_operator import ADAPTER
from operators.ranks import Ranks
from tests.gang import gang
from tuner.registry import load_adapter
from tuner.sweeping.sweep import read_sweep_file

FILE = Path(__file__).parents[2] / "examples" / "own_operator.yaml"


def _checked(ranks: Ranks, shape: dict[str, Any]) -> tuple[float, float]:
    return ADAPTER.reference_check(shape, {"chunks": 2}, ranks, "cpu", "flatpeak")


def test_its_file_is_a_sweep_of_it() -> None:
    spec = read_sweep_file(FILE)
    adapter = load_adapter(spec.operator)
    shape = adapter.shape(spec.shape, spec.target.ranks)
    space = adapter.space(shape, spec.target.ranks, "flatpeak")
    assert [knob.name for knob in space.knobs] == list(spec.space)
    bounds = [sum(adapter.bound_bytes(shape, {"chunks": k}, 2, "flatpeak").values()) for k in (1, 2, 4, 8)]
    assert bounds == sorted(bounds, reverse=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_right_on_every_rank(dtype: str) -> None:
    shape = ADAPTER.shape({"tokens": 8, "hidden": 4, "outputs": 4, "dtype": dtype}, 2)
    for error, allowed in gang(2).run(_checked, shape):
        assert error < allowed
