"""The shipped measurements can be read, are keyed by the machines they were taken on, and travel in the wheel."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from cost_model.errors import RuleError
from cost_model.presets import preset
from cost_model.reference import known_hardware, load_rates, load_samples
from cost_model.reference.load import SAMPLE_COLUMNS
from cost_model.reference.machines import MACHINES, ONE_H200, TWO_H200

ROOT = Path(__file__).parents[2]


def test_samples_have_the_columns_of_every_sample() -> None:
    frame = load_samples()
    assert tuple(frame.columns) == SAMPLE_COLUMNS
    operators = {"pipelined_llep", "ring_dtp", "stream_adamw"}
    sketched = frame["commit"] == "sketch"
    assert set(frame[sketched]["operator"]) == operators
    assert set(frame[~sketched]["operator"]) == operators | {"checkpoint_offload"}
    # what a sketch measured never passes for the operator
    assert set(frame[sketched]["operator_version"]) == {0}
    assert 0 not in set(frame[~sketched]["operator_version"])
    assert set(frame["hardware_id"]) <= set(known_hardware())
    assert frame["seconds"].notna().sum() >= 15
    # A row says something: a time or a peak, and a peak says how it was taken.
    assert (frame["seconds"].notna() | frame["allocated_bytes"].notna()).all()
    assert (frame["allocated_bytes"].isna() == frame["peak_source"].isna()).all()
    for column in ("config_json", "shape_json"):
        assert all(isinstance(json.loads(text), dict) for text in frame[column])


def test_chunk_at_a_time_backward_beats_the_nested_checkpoint() -> None:
    frame = load_samples()
    rows = frame[(frame["operator"] == "pipelined_llep") & (frame["peak_source"] == "cuda")]
    rows = rows[rows["commit"] == "sketch"]
    at_16 = rows[rows["config_json"].str.contains('"chunks": 16')].set_index("provider")["allocated_bytes"]
    assert at_16["flatpeak"] == pytest.approx(9.38 * 2**30, rel=1e-6)
    assert at_16["flatpeak"] < at_16["nested"]


def test_rates_are_keyed_by_machine_and_never_given_for_another() -> None:
    assert known_hardware() == tuple(machine.hardware_id for machine in MACHINES)
    curves = load_rates(TWO_H200.hardware_id)
    sizes, rates = zip(*curves["all_to_all"].points, strict=True)
    assert list(sizes) == sorted(sizes)
    assert list(rates) == sorted(rates)
    assert max(rates) == 330e9
    assert dict(load_rates(ONE_H200.hardware_id)["grouped_gemm"].points)[683] == 670e12
    with pytest.raises(RuleError, match="measured hardware only"):
        load_rates(preset("hgx-h200").hardware_id)


def test_files_lie_inside_a_package_that_the_wheel_ships() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    shipped = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert "cost_model" in shipped
    for name in ("samples.csv", "rates.json", "public_cases.json"):
        assert (ROOT / "cost_model" / "reference" / name).is_file()
    ignored = (ROOT / ".gitignore").read_text().split()
    assert not {"*.csv", "*.json"} & set(ignored)
