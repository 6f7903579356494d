"""The planner's copy of the dispatch bound equals the operator's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.bounds import pipelined_llep as planner
from cost_model.errors import RuleError
from operators.bounds import pipelined_llep as operator

GIB = 2**30


@given(
    tokens=st.integers(1, 200_000),
    hidden=st.sampled_from([64, 2880, 7168]),
    intermediate=st.sampled_from([32, 2048]),
    local=st.integers(1, 48),
    top_k=st.integers(1, 8),
    expert_ranks=st.sampled_from([1, 2, 8, 64]),
    chunks=st.integers(1, 64),
    schedule=st.sampled_from(["serial", "prefetch", "overlap"]),
    pass_=st.sampled_from(["forward", "backward"]),
    scalar_bytes=st.sampled_from([2, 4, 8]),
    rows=st.none() | st.integers(0, 10**6),
    migrated=st.integers(0, 8),
    sent=st.none() | st.integers(0, 8),
)
def test_both_rooms_agree(
    tokens: int,
    hidden: int,
    intermediate: int,
    local: int,
    top_k: int,
    expert_ranks: int,
    chunks: int,
    schedule: str,
    pass_: str,
    scalar_bytes: int,
    rows: int | None,
    migrated: int,
    sent: int | None,
) -> None:
    found = [
        room.pipelined_llep_terms(
            tokens=tokens,
            hidden=hidden,
            intermediate=intermediate,
            experts=local * expert_ranks,
            top_k=top_k,
            expert_ranks=expert_ranks,
            chunks=chunks,
            schedule=schedule,
            pass_=pass_,
            scalar_bytes=scalar_bytes,
            rows_per_chunk=rows,
            migrated_experts=migrated,
            sent_experts=sent,
        )
        for room in (planner, operator)
    ]
    assert found[0] == found[1]
    assert tuple(found[0]) == planner.TERMS
    assert all(value >= 0 for value in found[0].values())


def test_equation_one_gives_the_printed_bytes() -> None:
    at_once = planner.buffer_bytes(tokens=65_536, hidden=7168, top_k=8, expert_ranks=1, chunks=1)
    assert at_once / GIB == 14.0
    chunks = planner.chunk_count(tokens_max=65_536, chunk_tokens=6554, max_chunks=64)
    assert chunks == 10
    shape = {"tokens": 65_536, "hidden": 7168, "top_k": 8, "expert_ranks": 8, "chunks": chunks}
    assert planner.buffer_bytes(**shape) / GIB == pytest.approx(11.2, rel=1e-3)
    assert planner.expected_buffer_bytes(**shape) / GIB == pytest.approx(1.40, rel=1e-3)


@pytest.mark.parametrize("room", [planner, operator])
def test_unknown_schedule_is_refused(room: object) -> None:
    with pytest.raises(ValueError, match="serial, prefetch or overlap") as caught:
        room.pipelined_llep_terms(  # type: ignore[attr-defined]
            tokens=8,
            hidden=8,
            intermediate=8,
            experts=8,
            top_k=2,
            expert_ranks=2,
            chunks=1,
            schedule="eager",
            pass_="forward",
        )
    assert caught.type.__name__ == RuleError.__name__
