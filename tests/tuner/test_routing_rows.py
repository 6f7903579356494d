"""Dispatch samples get their router as numbers, for every profile that a sweep can run."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
import pytest

from cost_model.errors import RuleError
from operators.least_loaded import plan_least_loaded
from operators.routing import profile
from tuner.routing.rows import routing_values, with_routing

LAYER: dict[str, Any] = {"tokens_per_rank": 500, "hidden": 64, "intermediate": 32, "experts": 16, "top_k": 4}
LAYER |= {"dtype": "float32", "min_rows": 8}
PROFILES = ("balanced", "skew:80/4", "one_hot", "random", "rank_dependent", "drifting")
NUMBERS = ("imbalance", "migrated_experts", "send_ratio")


def rows(shape: dict[str, Any], ranks: int, operator: str = "pipelined_llep") -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"operator": operator, "shape_json": json.dumps(shape), "rank": rank, "ranks": ranks}
            for rank in range(ranks)
        ]
    )


@pytest.mark.parametrize("name", PROFILES)
def test_numbers_are_those_of_the_plan_of_the_ids_that_ran(name: str) -> None:
    ranks = 4
    sent = [
        profile(name, 500, 16, 4, rank, ranks=ranks).ids_NK.flatten().bincount(minlength=16)
        for rank in range(ranks)
    ]
    plan = plan_least_loaded(sum(sent[1:], sent[0]).tolist(), ranks, min_rows=8)
    values = routing_values({**LAYER, "profile": name}, ranks)
    assert values["imbalance"] == pytest.approx(max(plan.rank_rows()) * ranks / sum(plan.rank_rows()))
    assert values["migrated_experts"] == max(len(plan.guests(rank)) for rank in range(ranks))
    assert values["send_ratio"] >= 1.0


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_of_a_sweep_gets_its_numbers(name: str) -> None:
    told = with_routing(rows({**LAYER, "profile": name}, 4))
    assert told["shape_json"].nunique() == 1
    shape = json.loads(told["shape_json"].iloc[0])
    assert {key: shape[key] for key in NUMBERS} == routing_values({**LAYER, "profile": name}, 4)
    assert shape["ranks"] == 4


def test_ranks_are_of_each_row_not_of_the_whole_table() -> None:
    shape = {**LAYER, "profile": "skew:80/4"}
    told = with_routing(pd.concat([rows(shape, 2), rows(shape, 4)], ignore_index=True))
    found = [json.loads(text) for text in told["shape_json"]]
    assert [one["ranks"] for one in found] == [2, 2, 4, 4, 4, 4]
    assert found[0]["imbalance"] == routing_values(shape, 2)["imbalance"]
    assert found[-1]["migrated_experts"] == routing_values(shape, 4)["migrated_experts"]


def test_a_table_without_the_column_counts_its_ranks() -> None:
    told = with_routing(rows({**LAYER, "profile": "skew:80/4"}, 4).drop(columns="ranks"))
    assert json.loads(told["shape_json"].iloc[0])["ranks"] == 4


def test_loopback_has_the_size_of_its_group_and_peers_like_itself() -> None:
    shape = {**LAYER, "profile": "rank_dependent", "ranks": 8, "loopback": True}
    told = json.loads(with_routing(rows(shape, 1))["shape_json"].iloc[0])
    alone = profile("rank_dependent", 500, 16, 4, 0, ranks=8).ids_NK.flatten().bincount(minlength=16)
    plan = plan_least_loaded((8 * alone).tolist(), 8, min_rows=8)
    assert told["ranks"] == 8
    assert told["migrated_experts"] == max(len(plan.guests(rank)) for rank in range(8))


def test_given_numbers_and_other_operators_are_kept() -> None:
    measured = {**LAYER, "profile": "skew:80/4", "imbalance": 1.7, "migrated_experts": 3}
    told = json.loads(with_routing(rows(measured, 4))["shape_json"].iloc[0])
    assert (told["imbalance"], told["migrated_experts"]) == (1.7, 3)
    head = rows({"tokens_per_rank": 8}, 2, "ring_dtp")
    mixed = with_routing(pd.concat([head, rows(LAYER, 2)], ignore_index=True))
    assert list(mixed["shape_json"][:2]) == list(head["shape_json"])
    assert with_routing(head).equals(head)
    assert with_routing(head[:0]).empty


def test_of_a_group_in_loopback_one_rank_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def counted(*given: Any, **named: Any) -> Any:
        drawn.append(given[4])
        return profile(*given, **named)

    monkeypatch.setattr("operators.routing.profile", counted)
    shape = {**LAYER, "tokens_per_rank": 60, "experts": 512, "profile": "random", "loopback": True}
    assert routing_values(shape, 512)["imbalance"] >= 1.0
    assert drawn == [0]
    routing_values({**shape, "loopback": False}, 4)
    assert drawn == [0, 0, 1, 2, 3]
    routing_values({**shape, "profile": "drifting", "loopback": False}, 4)
    assert drawn[5:] == [0]


@pytest.mark.parametrize(
    ("name", "tokens", "ranks", "loopback"),
    [
        ("random", 2**16, 4096, True),
        ("random", 2**16, 4096, False),
        ("rank_dependent", 2**12, 2**11, False),
        ("random", 2**10, 2**11, False),
        ("one_hot", 2**10, 4096, True),
        ("balanced", 2**40, 8, False),
        ("drifting", 2**30, 8, False),
    ],
)
def test_what_takes_too_long_to_count_is_refused_and_marked(
    name: str, tokens: int, ranks: int, loopback: bool
) -> None:
    shape = {"tokens_per_rank": tokens, "experts": 4096, "top_k": 8, "profile": name, "loopback": loopback}
    with pytest.raises(RuleError, match="is counted for at most"):
        routing_values(shape, ranks)
    row = {"operator": "pipelined_llep", "shape_json": json.dumps(shape), "rank": 0, "ranks": ranks}
    told = json.loads(with_routing(pd.DataFrame([row]))["shape_json"].iloc[0])
    assert (told["imbalance"], told["ranks"]) == (None, ranks)


@pytest.mark.parametrize(
    "strange",
    [{"experts": 0}, {"top_k": None}, {"profile": "sideways"}, {"ranks": 0}, {"tokens_per_rank": "x"}],
)
def test_a_shape_that_is_none_does_not_end_the_whole_table(strange: dict[str, Any]) -> None:
    told = with_routing(pd.concat([rows({**LAYER, **strange}, 4), rows(LAYER, 4)], ignore_index=True))
    found = [json.loads(text)["imbalance"] for text in told["shape_json"]]
    assert found[:4] == [None] * 4
    assert None not in found[4:]
