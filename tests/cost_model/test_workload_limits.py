"""What a workload and a cost model refuse, whoever writes them: figures that only surface as nonsense later."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

from cost_model.errors import RuleError
from cost_model.presets import preset
from cost_model.rates import CostModel
from cost_model.rates_default import default_cost_model
from cost_model.workload import MAX_TOKENS, Workload


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("imbalance", math.nan),
        ("imbalance", math.inf),
        ("imbalance", 0.99),
        ("migrated_experts", -1),
        ("migrated_experts", 10**9),
        ("migrated_experts", True),
        ("context_tokens", 1024.0),
        ("context_tokens", True),
        ("global_batch_tokens", 10**24),
        ("global_batch_tokens", MAX_TOKENS * 2),
        ("activation_bytes", 2.0),
    ],
)
def test_a_workload_holds_finite_figures_in_range(field: str, value: Any) -> None:
    with pytest.raises(RuleError) as refused:
        Workload(**{"context_tokens": 1024, "global_batch_tokens": 4096, field: value})
    assert field in refused.value.rule
    assert refused.value.remedy


def test_guests_are_at_most_the_experts_there_are() -> None:
    work = Workload(1024, 4096, migrated_experts=33)
    work.check_model(33)
    with pytest.raises(RuleError, match="32 experts"):
        work.check_model(32)


_BROKEN: list[tuple[tuple[str, ...], Any]] = [
    ((), []),
    (("version",), "one"),
    (("rates",), []),
    (("rates",), {"x": 1}),
    (("rates", "dense_flops", "value"), "fast"),
    (("rates", "dense_flops", "value"), math.nan),
    (("rates", "dense_flops", "high"), math.inf),
    (("rates", "dense_flops", "unit"), "furlong"),
    (("rates", "dense_flops", "provenance"), "hearsay"),
    (("scales",), {"ring_dtp:forward": -1.0}),
    (("scales",), {"ring_dtp:forward": 0.0}),
    (("scales",), {"ring_dtp:forward": math.inf}),
    (("scales",), [1.0]),
    (("spreads",), {"ring_dtp:forward": "wide"}),
    (("spreads",), {"ring_dtp:forward": -0.1}),
    (("spreads",), {"ring_dtp:forward": math.nan}),
    (("facts",), {"peak_flops": 0.0}),
    (("coverage",), {"ring_dtp": {"tokens": [1.0]}}),
    (("coverage",), {"ring_dtp": 3}),
]


@pytest.mark.parametrize(("path", "value"), _BROKEN)
def test_a_damaged_cost_model_is_refused_by_rule(path: tuple[str, ...], value: Any) -> None:
    body: Any = copy.deepcopy(default_cost_model(preset("hgx-h200")).to_json())
    assert CostModel.from_json(body).to_json() == body
    if path:
        inner = body
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
    else:
        body = value
    with pytest.raises(RuleError) as refused:
        CostModel.from_json(body)
    assert refused.value.rule
    assert refused.value.remedy
