"""The least-loaded planner, and what a dispatch plan makes of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from operators.dispatch_launch import DispatchLaunch
from operators.dispatch_plan import plan_from_counts
from operators.errors import RuleError
from operators.least_loaded import imbalance, plan_least_loaded
from operators.routing import Routing, profile

LOADS = st.integers(1, 6).flatmap(
    lambda ranks: st.tuples(
        st.just(ranks),
        st.integers(1, 5).flatmap(
            lambda n: st.lists(st.integers(0, 500) | st.just(0), min_size=n * ranks, max_size=n * ranks)
        ),
    )
)


@given(LOADS, st.floats(1.0, 2.0), st.integers(1, 60), st.floats(1.0, 3.0))
def test_every_row_goes_to_one_rank(
    drawn: tuple[int, list[int]], alpha: float, min_rows: int, switch: float
) -> None:
    ranks, loads = drawn
    plan = plan_least_loaded(loads, ranks, alpha=alpha, min_rows=min_rows, switch=switch)
    for rows, pieces in zip(loads, plan.intervals, strict=True):
        at = 0
        for rank, start, end in pieces:
            assert 0 <= rank < ranks
            assert start == at < end
            at = end
        assert at == rows
    assert sum(plan.rank_rows()) == sum(loads)
    assert plan == plan_least_loaded(list(loads), ranks, alpha=alpha, min_rows=min_rows, switch=switch)


@given(LOADS, st.floats(1.0, 2.0))
def test_capacity_holds_when_any_piece_is_allowed(drawn: tuple[int, list[int]], alpha: float) -> None:
    """With m = 1 nothing is forced but the rest that ⌊·⌋ leaves over, less than one row a rank."""
    ranks, loads = drawn
    plan = plan_least_loaded(loads, ranks, alpha=alpha, min_rows=1, switch=1.0)
    if plan.spread:
        capacity = int(alpha * sum(loads) / ranks)
        assert max(plan.rank_rows()) <= capacity + ranks


@given(LOADS, st.integers(1, 60))
def test_guest_pieces_have_m_rows_but_for_the_last(drawn: tuple[int, list[int]], min_rows: int) -> None:
    ranks, loads = drawn
    plan = plan_least_loaded(loads, ranks, min_rows=min_rows, switch=1.0)
    for expert, pieces in enumerate(plan.intervals):
        for rank, start, end in pieces[:-1]:
            assert rank == plan.native(expert) or end - start >= min_rows


@given(LOADS, st.floats(1.0, 4.0))
def test_even_loads_keep_plain_expert_parallelism(drawn: tuple[int, list[int]], switch: float) -> None:
    ranks, loads = drawn
    plan = plan_least_loaded(loads, ranks, min_rows=1, switch=switch)
    if ranks > 1 and max(loads):
        assert plan.spread == (imbalance(loads, ranks) >= switch)
    if not plan.spread:
        assert all(p.rank == plan.native(e) for e, cut in enumerate(plan.intervals) for p in cut)
        assert not any(plan.guests(r) for r in range(ranks))


@pytest.mark.parametrize(
    ("loads", "ranks", "knobs"),
    [
        ([1, 2, 3], 2, {}),
        ([], 1, {}),
        ([1, -1], 2, {}),
        ([1, 1], 2, {"alpha": 0.5}),
        ([1, 1], 2, {"min_rows": 0}),
    ],
)
def test_wrong_input_is_refused(loads: list[int], ranks: int, knobs: dict[str, float]) -> None:
    with pytest.raises(RuleError):
        plan_least_loaded(loads, ranks, **knobs)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(["balanced", "skew:90/2", "random", "one_hot", "rank_dependent", "ties"]),
    st.lists(st.integers(0, 30), min_size=4, max_size=4),
    st.integers(1, 9),
)
def test_plans_of_all_ranks_fit_together(name: str, tokens: list[int], chunks: int) -> None:
    """What one rank sends another in a chunk is what the other expects, and every route is sent once."""
    ranks, experts, top_k = 4, 8, 2
    routings = [profile(name, n, experts, top_k, r, ranks=ranks) for r, n in enumerate(tokens)]
    launch = DispatchLaunch.for_chunks(chunks, max(1, *tokens), min_rows=3, lambda_=1.1)
    real = launch.chunks(max(tokens))
    keys = [_keys(r, real) for r in routings]
    counts = torch.stack([torch.bincount(k, minlength=real * experts).view(real, experts) for k in keys])
    plans = [
        plan_from_counts(counts, torch.sort(k, stable=True).indices, routing, rank, launch)
        for rank, (k, routing) in enumerate(zip(keys, routings, strict=True))
    ]
    for me, plan in enumerate(plans):
        for peer, other in enumerate(plans):
            for i in range(real):
                assert plan.send_splits[i][peer] == other.receive_splits[i][me]
        assert sorted(plan.route_order.tolist()) == list(range(tokens[me] * top_k))
        for i in range(real):
            rows = plan.receive_range(i)
            assert sorted(plan.sort_index[rows].tolist()) == list(range(plan.received(i)))
            forth, back = plan.sort_index[rows].long(), plan.back_index[rows].long()
            assert torch.equal(forth[back], torch.arange(plan.received(i)))
            assert sum(plan.slot_rows[i]) == plan.received(i)


def _keys(routing: Routing, chunks: int) -> torch.Tensor:
    chunk = torch.arange(routing.tokens) % chunks
    return (chunk.unsqueeze(1) * routing.experts + routing.ids_NK).flatten()
