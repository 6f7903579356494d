"""launch.json: the reader and its schema agree, and a run is held to its plan."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.launch import LaunchConfig
from operators.errors import RuleError
from operators.launch import HardwareMismatch, launch_schema, parse_launch, read_launch

_CONFIG = LaunchConfig(
    sequence_degree=2,
    expert_degree=4,
    vocab_degree=2,
    max_tokens_per_rank=1024,
    accumulation_steps=1,
    chunk_tokens=256,
    max_chunks=8,
    dispatch_schedule="prefetch",
    strip_rows=128,
    ring_mode="auto",
    host_budget_bytes=1 << 20,
    optimizer_engine="stream",
    bucket_params=1000,
    staging_slots=2,
)


def _body() -> dict[str, Any]:
    return {
        "schema_version": 1,
        "flatpeak_version": "0.1.0",
        "plan_id": "pln_1",
        "hardware_id": "h200-x8-abc",
        "model": {"name": "m", "hidden": 64, "layers": 2, "vocab": 100, "experts": 8, "top_k": 2},
        "launch": _CONFIG.to_json(),
    }


def test_what_the_planner_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "launch.json"
    path.write_text(json.dumps(_body()))
    launch = read_launch(path)
    for name in launch.__dataclass_fields__:
        if hasattr(_CONFIG, name):
            assert getattr(launch, name) == getattr(_CONFIG, name)
    assert (launch.model["hidden"], launch.plan_id, launch.flatpeak_version) == (64, "pln_1", "0.1.0")
    jsonschema.Draft202012Validator.check_schema(launch_schema())
    jsonschema.validate(_body(), launch_schema(), jsonschema.Draft202012Validator)


def test_the_schema_names_exactly_the_keys_of_a_launch_config() -> None:
    launch = launch_schema()["properties"]["launch"]
    assert set(launch["required"]) == set(launch["properties"]) == set(_CONFIG.to_json())


_LEAVES = [
    *((key,) for key in ("schema_version", "plan_id", "hardware_id", "flatpeak_version", "model", "launch")),
    *(("model", key) for key in _body()["model"]),
    *(("launch", key) for key in _CONFIG.to_json()),
    ("launch", "unheard_of"),
]
_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.floats(-2, 3, allow_nan=False),
    st.sampled_from([1.0, 2.0, "serial", "auto", "host", "contiguous", "", [], {}, "nonsense"]),
)


@given(leaf=st.sampled_from(_LEAVES), value=_VALUES, drop=st.booleans())
def test_reader_and_schema_refuse_the_same(leaf: tuple[str, ...], value: object, drop: bool) -> None:
    body = copy.deepcopy(_body())
    inner: Any = body
    for key in leaf[:-1]:
        inner = inner[key]
    if drop:
        inner.pop(leaf[-1], None)
    else:
        inner[leaf[-1]] = value
    valid = jsonschema.Draft202012Validator(launch_schema()).is_valid(body)
    refusal: RuleError | None = None
    try:
        parse_launch(body)
    except RuleError as error:
        refusal = error
    # two rules tie values to each other, which a schema cannot say
    tied = refusal is not None and any(
        text in refusal.rule for text in ("$.model.top_k: a token", "expert_degree: it divides")
    )
    assert valid == (refusal is None or tied)
    assert refusal is None or (refusal.rule.startswith("$") and refusal.remedy)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"chunk_tokens": 0}, "$.launch.chunk_tokens: it is at least 1"),
        ({"staging_slots": True}, "$.launch.staging_slots: it is of type integer"),
        ({"host_share": 1.5}, "$.launch.host_share: it is at most 1"),
        ({"alpha": 0}, "$.launch.alpha: it is above 0"),
        ({"ring_mode": "sideways"}, "$.launch.ring_mode: it is one of"),
        ({"expert_degree": 3}, "$.launch.expert_degree: it divides"),
        ({"new_knob": 1}, "$.launch.new_knob: this release knows no such key"),
    ],
)
def test_errors_name_path_value_and_remedy(change: dict[str, object], path: str) -> None:
    body = _body()
    body["launch"] |= change
    with pytest.raises(RuleError) as caught:
        parse_launch(body)
    assert caught.value.rule.startswith(path)
    assert caught.value.value == next(iter(change.values()))
    assert caught.value.remedy


def test_another_version_is_refused_before_anything_else() -> None:
    with pytest.raises(RuleError, match=r"\$.schema_version: this release reads version 1") as caught:
        parse_launch({"schema_version": 2, "knobs": {}})
    assert caught.value.value == 2


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "must be JSON"),
        ("[]", r"\$: it is of type object"),
        ('{"schema_version": 1, "schema_version": 1}', "appears once"),
        ('{"schema_version": NaN}', "finite"),
        ('{"schema_version": ' + "9" * 5000 + "}", "must be JSON"),
        ("[" * 200_000, "must be JSON"),
        ("\ufeff{}", "must be JSON"),
        (
            json.dumps(_body()).replace('"alpha": 1.0', '"alpha": 1e400'),
            r"\$.launch.alpha: numbers are finite",
        ),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "launch.json"
    path.write_text(text)
    with pytest.raises(RuleError, match=match):
        read_launch(path)
    with pytest.raises(RuleError, match="readable"):
        read_launch(tmp_path / "none.json")
    with pytest.raises(RuleError, match="readable"):
        read_launch("a\0b")


def test_more_tokens_than_planned_are_refused_naming_both() -> None:
    launch = parse_launch(_body())
    launch.check_tokens(1024)
    with pytest.raises(RuleError, match="N_max = 1024") as caught:
        launch.check_tokens(1025)
    assert caught.value.value == 1025
    assert [launch.chunks(n) for n in (0, 1, 256, 257, 1 << 20)] == [1, 1, 1, 2, 8]


def test_other_hardware_is_said() -> None:
    launch = parse_launch(_body())
    assert launch.check_hardware("h200-x8-abc")
    with pytest.warns(HardwareMismatch, match="planned for hardware 'h200-x8-abc', this is 'h100'"):
        assert not launch.check_hardware("h100")
    assert not parse_launch(_body() | {"hardware_id": None}).check_hardware("h100")


def test_the_reader_imports_nothing_beyond_the_standard_library() -> None:
    code = (
        "import sys, operators.launch as l; l.launch_schema();"
        "print([m for m in ('torch', 'numpy', 'pydantic', 'jsonschema') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_plan_is_no_launch_file_and_is_told_how_to_become_one() -> None:
    with pytest.raises(RuleError) as refused:
        parse_launch({"verdict": "fits", "id": "pln_1", "launch": _CONFIG.to_json()})
    assert refused.value.value == "pln_1"
    assert "flatpeak export" in refused.value.remedy


@pytest.mark.parametrize("kind", ["number", "list"])
def test_a_value_that_cannot_be_shown_is_refused_all_the_same(kind: str) -> None:
    value: Any = 10**5000 if kind == "number" else []
    if kind == "list":
        for _ in range(5000):
            value = [value]
    body = _body()
    body["launch"]["host_share"] = value
    with pytest.raises(RuleError, match="too large to show"):
        parse_launch(body)
