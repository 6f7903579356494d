"""The example job: all operators from one launch.json, whatever its knobs say the same training step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.job import main, train
from operators.errors import RuleError
from operators.launch import parse_launch
from operators.ranks import Ranks
from tests.gang import gang

_TOKENS = 40


def _body(**knobs: object) -> dict[str, Any]:
    launch = {
        "schema_version": 1,
        "sequence_degree": 1,
        "expert_degree": 2,
        "vocab_degree": 2,
        "max_tokens_per_rank": 48,
        "accumulation_steps": 2,
        "chunk_tokens": 48,
        "max_chunks": 1,
        "dispatch_schedule": "serial",
        "alpha": 1.0,
        "min_rows": 4,
        "lambda": 1.0,
        "ring_mode": "activations",
        "strip_rows": 48,
        "host_budget_bytes": 0,
        "optimizer_engine": "stream",
        "host_share": 0.0,
        "bucket_params": 2048,
        "staging_slots": 2,
        "placement": "contiguous",
    }
    model = {"name": "m", "hidden": 16, "layers": 1, "vocab": 50, "experts": 4, "top_k": 2}
    return {"schema_version": 1, "model": model | {"expert_intermediate": 24}, "launch": launch | knobs}


def _train(ranks: Ranks, body: dict[str, Any]) -> tuple[float, float]:
    return train(parse_launch(body), _TOKENS)


@pytest.mark.parametrize(
    "knobs",
    [
        {"chunk_tokens": 8, "max_chunks": 8, "dispatch_schedule": "overlap"},
        {"ring_mode": "weights", "strip_rows": 7, "host_budget_bytes": 1 << 20},
        {"ring_mode": "gather", "bucket_params": 500, "staging_slots": 3, "optimizer_engine": "device"},
    ],
)
def test_knobs_change_memory_and_time_not_the_step(knobs: dict[str, object]) -> None:
    plain, tuned = gang(2).run(_train, _body()), gang(2).run(_train, _body(**knobs))
    assert plain[0] == plain[1]
    assert plain[0][1] < plain[0][0]
    for one, other in zip(plain, tuned, strict=True):
        assert other == pytest.approx(one, rel=1e-5)


def test_replicated_experts_and_heads_take_one_step_together() -> None:
    before, after = gang(2).run(_train, _body(expert_degree=1, vocab_degree=1))[0]
    assert after < before


def _refused(ranks: Ranks) -> str:
    try:
        train(parse_launch(_body(expert_degree=4)), _TOKENS)
    except RuleError as error:
        return str(error)
    return "ran"


def test_a_degree_that_does_not_divide_the_ranks_is_refused() -> None:
    assert all("divides the number of ranks (got (4, 2))" in text for text in gang(2).run(_refused))


def test_more_tokens_than_planned_end_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "launch.json"
    path.write_text(json.dumps(_body()))
    assert main([str(path), "--tokens", "49"]) == 1
    said = capsys.readouterr().err
    assert "N_max = 48" in said
    assert "got: 49" in said
    assert main([str(tmp_path / "none.json")]) == 1
