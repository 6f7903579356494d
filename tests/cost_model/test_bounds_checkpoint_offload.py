"""The two writings of SCO's bytes agree, and give the published figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cost_model.bounds.checkpoint_offload as planned
import operators.bounds.checkpoint_offload as run

_GIB = 2**30


@given(
    tokens=st.integers(0, 1 << 20),
    hidden=st.integers(1, 16384),
    boundaries=st.integers(0, 200),
    scalar_bytes=st.sampled_from([1, 2, 4]),
    budget=st.integers(0, 1 << 42),
)
def test_both_rooms_agree(tokens: int, hidden: int, boundaries: int, scalar_bytes: int, budget: int) -> None:
    size = run.boundary_bytes(tokens=tokens, hidden=hidden, scalar_bytes=scalar_bytes)
    assert size == planned.boundary_bytes(tokens=tokens, hidden=hidden, scalar_bytes=scalar_bytes)
    count = run.offloaded_count(boundary_bytes=size, boundaries=boundaries, host_budget_bytes=budget)
    assert count == planned.offloaded_count(
        boundary_bytes=size, boundaries=boundaries, host_budget_bytes=budget
    )
    locked = run.locked_bytes(boundary_bytes=size, offloaded=count)
    assert locked == planned.locked_bytes(boundary_bytes=size, offloaded=count)
    assert locked <= budget
    assert 0 <= count <= max(0, boundaries - 1)
    terms = run.checkpoint_offload_terms(
        tokens=tokens, hidden=hidden, boundaries=boundaries, offloaded=count, scalar_bytes=scalar_bytes
    )
    assert terms == planned.checkpoint_offload_terms(
        tokens=tokens, hidden=hidden, boundaries=boundaries, offloaded=count, scalar_bytes=scalar_bytes
    )
    assert list(terms) == ["boundaries_restored", "boundaries_resident"]


def test_published_figures() -> None:
    size = run.boundary_bytes(tokens=69_632, hidden=2880)
    assert size / _GIB == pytest.approx(0.37354, abs=5e-6)
    # 8 GiB holds 21 boundaries, as in the paper, and locks 7.84 GiB; power-of-two blocks locked 10.5
    count = run.offloaded_count(boundary_bytes=size, boundaries=47, host_budget_bytes=8 * _GIB)
    assert count == 21
    assert run.locked_bytes(boundary_bytes=size, offloaded=count) / _GIB == pytest.approx(7.844, abs=1e-3)
    everything = run.offloaded_count(boundary_bytes=size, boundaries=47, host_budget_bytes=1 << 40)
    assert everything == 46
    terms = run.checkpoint_offload_terms(tokens=69_632, hidden=2880, boundaries=47, offloaded=everything)
    assert terms == {"boundaries_restored": 2 * size, "boundaries_resident": size}


def test_boundaries_of_a_byte_more_than_a_power_of_two_fit_the_budget() -> None:
    size = 2**20 + 1
    budget = 3 * (2**20 + 4096)
    assert run.offloaded_count(boundary_bytes=size, boundaries=9, host_budget_bytes=budget) == 3
    assert run.offloaded_count(boundary_bytes=size, boundaries=9, host_budget_bytes=budget - 1) == 2
