"""Layouts at the edges: pins that leave none, batches with thousands of divisors, guests there cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.errors import RuleError
from cost_model.hf_config import load_hf_config
from cost_model.memory import memory_report
from cost_model.presets import preset
from cost_model.rates_default import default_cost_model
from cost_model.workload import Workload
from tuner.exporters.launch_file import export_launch
from tuner.planning.layouts import MAX_BATCHES, batches, spread
from tuner.planning.planner import make_plan

MODEL = load_hf_config(Path(__file__).parents[2] / "examples" / "models" / "small-moe.json")
CLUSTER = preset("hgx-h200")
COST = default_cost_model(CLUSTER)
WORK = Workload(4096, 4096 * 8)


@given(st.integers(1, 400))
def test_a_selection_of_sizes_keeps_the_ends_and_rises(count: int) -> None:
    sizes = [3 * i + 1 for i in range(count)]
    kept = spread(sizes)
    assert len(kept) == min(count, MAX_BATCHES)
    assert kept == sorted(set(kept))
    assert set(kept) <= set(sizes)
    assert (kept[0], kept[-1]) == (sizes[0], sizes[-1])


def test_a_batch_of_very_many_divisors_is_planned_over_a_bounded_number_of_layouts() -> None:
    work = Workload(1, 963_761_198_400)  # 6,720 divisors
    found = list(batches(MODEL, CLUSTER, work, {}))
    assert 1 < len(found) <= MAX_BATCHES
    for batch in found:
        assert batch.tokens * CLUSTER.world_size * batch.accumulation_steps == work.global_batch_tokens
    left_out = next(
        tokens for tokens in (7, 11, 13, 77, 91, 143) if tokens not in {batch.tokens for batch in found}
    )
    pinned = list(batches(MODEL, CLUSTER, work, {"max_tokens_per_rank": left_out}))
    assert [batch.tokens for batch in pinned] == [left_out]


@pytest.mark.parametrize(
    "pins",
    [
        {"max_tokens_per_rank": 7},
        {"accumulation_steps": 3},
        {"sequence_degree": 8, "max_tokens_per_rank": 4096 * 3},
    ],
)
def test_the_remedy_of_an_impossible_pin_is_to_release_it(pins: dict[str, int]) -> None:
    with pytest.raises(RuleError) as refused:
        make_plan(MODEL, CLUSTER, WORK, COST, fixed=pins)
    for key, value in pins.items():
        assert f"{key}={value}" in refused.value.remedy
    assert "divisible" not in refused.value.remedy


def test_more_guests_than_experts_are_refused_by_plan_and_check() -> None:
    plan = make_plan(MODEL, CLUSTER, WORK, COST)
    crowded = replace(WORK, migrated_experts=MODEL.experts + 1)
    with pytest.raises(RuleError, match="guests"):
        make_plan(MODEL, CLUSTER, crowded, COST)
    with pytest.raises(RuleError, match="guests"):
        memory_report(MODEL, CLUSTER, crowded, plan.launch)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["chunk_tokens", "max_chunks", "expert_degree", "sequence_degree", "strip_rows"]),
    st.sampled_from([-5, 0, "two", 1.5, None, True]),
)
def test_a_tampered_plan_is_not_exported(key: str, value: object) -> None:
    body = PLAN | {"launch": PLAN["launch"] | {key: value}}
    with pytest.raises(RuleError, match=key):
        export_launch(body)


def test_a_plan_with_an_unknown_or_impossible_launch_is_not_exported() -> None:
    assert export_launch(PLAN)["launch"] == PLAN["launch"]
    for launch in ({"evil": 1}, {"expert_degree": 7}):
        with pytest.raises(RuleError, match=next(iter(launch))):
            export_launch(PLAN | {"launch": PLAN["launch"] | launch})


PLAN = make_plan(MODEL, CLUSTER, WORK, COST).to_json()
