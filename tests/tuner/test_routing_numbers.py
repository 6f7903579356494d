"""Routing numbers: profiles by position, and what the least-loaded plan makes of them."""

from __future__ import annotations

import pytest

from cost_model.errors import RuleError
from cost_model.workload import Workload
from operators.routing import profile
from tuner.routing.numbers import profile_loads, routing_numbers


@pytest.mark.parametrize("name", ["balanced", "skew:80/16", "skew:30/4", "one_hot"])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1000, 32, 4), (257, 128, 8)])
def test_loads_are_those_of_the_operators_profile(name: str, tokens: int, experts: int, top_k: int) -> None:
    ids = profile(name, tokens, experts, top_k).ids_NK
    counts = ids.flatten().bincount(minlength=experts).tolist()
    assert profile_loads(name, tokens, experts, top_k) == counts


def test_a_balanced_router_needs_no_plan() -> None:
    numbers = routing_numbers(profile_loads("balanced", 65536, 128, 8), 8)
    assert numbers.imbalance == pytest.approx(1.0, abs=1e-3)
    assert numbers.migrated_experts == 0
    assert numbers.send_ratio == pytest.approx(1.0, abs=1e-3)


def test_a_skewed_router_is_balanced_by_migration() -> None:
    numbers = routing_numbers(profile_loads("skew:80/16", 65536, 128, 8), 8)
    assert numbers.imbalance > 4
    assert numbers.balanced_imbalance < 1.05
    assert numbers.migrated_experts > 0
    assert numbers.send_ratio >= 1
    work = numbers.applied_to(Workload(4096, 4096))
    assert (work.imbalance, work.migrated_experts) == (numbers.imbalance, numbers.migrated_experts)


def test_no_rows_at_all() -> None:
    numbers = routing_numbers([0, 0, 0, 0], 2)
    assert (numbers.imbalance, numbers.balanced_imbalance, numbers.send_ratio) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("name", ["random", "skew:80", "skew:80/128", "skew:a/b", "skew:101/4"])
def test_profiles_without_loads_by_position_are_refused(name: str) -> None:
    with pytest.raises(RuleError):
        profile_loads(name, 100, 128, 8)
