"""Values of broken rules: whatever they are, they can be shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from api.errors import plain
from cost_model.errors import RuleError
from tuner.sweeping.sweep_spec import read_sweep_file


def nest(levels: int, inside: object) -> object:
    for _ in range(levels):
        inside = [inside]
    return inside


ODD = {
    "lists": nest(900, 1),
    "wide lists": [nest(5000, 1)] * 60,
    "mapping": {"a": nest(100_000, 1)},
    "number": 10**20_000,
    "mapping of a number": {"a": -(10**5000)},
}


@pytest.mark.parametrize("name", ODD)
def test_what_cannot_be_written_out_is_shown_by_its_type(name: str) -> None:
    error = RuleError(rule="r", value=ODD[name], remedy="m")
    shown = json.dumps(plain(error.value))
    assert len(shown) < 1000
    assert str(error).startswith("r (got ")


def test_what_is_short_is_kept() -> None:
    kept = [None, True, 3, 2.5, "é", [[1, ["a"]]], 2**60]
    assert plain(kept) == kept
    assert plain(float("nan")) == "nan"
    assert plain(Path("a")) == "a"
    assert plain("\ud800") == "?"
    assert plain(nest(6, 1)) == nest(4, "[[1]]")


@pytest.mark.parametrize("value", ["0x" + "f" * 9000, "[" * 120 + "]" * 120])
def test_a_sweep_file_with_such_a_value_is_refused_by_rule(tmp_path: Path, value: str) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(f"operator: ring_dtp\ntarget: {{ranks: {value}}}\nshape: {{}}\n")
    with pytest.raises(RuleError, match="ranks"):
        read_sweep_file(path)
