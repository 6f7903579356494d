"""The planner's closed form of the head equals the operator's own bound, and the published figures."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.bounds import ring_dtp as planning
from cost_model.errors import RuleError
from operators.bounds import ring_dtp as operator

GIB = 2**30


@settings(deadline=None)
@given(
    tokens=st.integers(0, 1 << 18),
    hidden=st.integers(1, 1 << 14),
    vocab=st.integers(1, 300_000),
    vocab_ranks=st.integers(1, 64),
    ring_mode=st.sampled_from(["activations", "weights", "gather", "auto"]),
    strip_rows=st.integers(1, 1 << 16),
    pass_=st.sampled_from(["forward", "backward"]),
    scalar_bytes=st.sampled_from([2, 4, 8]),
    gradient_hop=st.sampled_from(["serial", "overlapped"]),
)
def test_both_rooms_state_the_same_bytes(**launch: object) -> None:
    ours = planning.ring_dtp_terms(**launch)  # type: ignore[arg-type]
    assert ours == operator.ring_dtp_terms(**launch)  # type: ignore[arg-type]
    assert set(ours) == {"strips", "movers", "accumulators", "inputs_outputs"}
    assert min(ours.values()) >= 0


@settings(deadline=None)
@given(tokens=st.integers(0, 10**6), vocab=st.integers(1, 10**6), vocab_ranks=st.integers(1, 512))
def test_both_rooms_move_the_same(tokens: int, vocab: int, vocab_ranks: int) -> None:
    assert planning.resolve_ring_mode(tokens, vocab, vocab_ranks) == operator.resolve_ring_mode(
        tokens, vocab, vocab_ranks
    )


@settings(deadline=None)
@given(columns=st.integers(0, 10**6), scalar_bytes=st.sampled_from([2, 4, 8]), gathered=st.booleans())
def test_both_rooms_choose_the_same_tile(columns: int, scalar_bytes: int, gathered: bool) -> None:
    assert planning.default_strip_rows(
        columns, scalar_bytes, gathered=gathered
    ) == operator.default_strip_rows(columns, scalar_bytes, gathered=gathered)


def test_materialised_head_is_the_published_one() -> None:
    # fp32, H = 7168, V = 200,000, forward and backward
    for tokens, gib in ((16_384, 42.462), (32_768, 79.521)):
        for room in (planning, operator):
            head = room.materialised_head_bytes(tokens=tokens, hidden=7168, vocab=200_000)
            assert head / GIB == pytest.approx(gib, rel=0.005)


@pytest.mark.parametrize(
    ("tokens", "mode", "hop", "gib"),
    [
        (16_384, "activations", "serial", 3.7),
        (32_768, "weights", "serial", 5.3),
        (16_384, "activations", "overlapped", 4.2),
        (32_768, "weights", "overlapped", 6.0),
    ],
)
def test_ring_is_far_below_it(tokens: int, mode: str, hop: str, gib: float) -> None:
    assert planning.resolve_ring_mode(tokens, 200_000, 8) == mode
    terms = planning.ring_dtp_terms(
        tokens=tokens,
        hidden=7168,
        vocab=200_000,
        vocab_ranks=8,
        ring_mode="auto",
        strip_rows=4096,
        pass_="backward",
        scalar_bytes=4,
        gradient_hop=hop,
    )
    assert sum(terms.values()) / GIB <= gib


@pytest.mark.parametrize(
    "wrong",
    [{"ring_mode": "ring"}, {"pass_": "both"}, {"gradient_hop": "late"}, {"vocab_ranks": 0}, {"tokens": -1}],
)
def test_wrong_words_and_sizes_are_refused(wrong: dict[str, object]) -> None:
    launch: dict[str, object] = {
        "tokens": 8,
        "hidden": 4,
        "vocab": 10,
        "vocab_ranks": 2,
        "ring_mode": "weights",
        "strip_rows": 4,
        "pass_": "forward",
    }
    with pytest.raises(RuleError):
        planning.ring_dtp_terms(**(launch | wrong))  # type: ignore[arg-type]
