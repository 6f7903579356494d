"""The front, and when a point cannot reach it any more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tuner.measuring.front import SLOWEST_MODE, front, out_of_reach, slack

POINTS = st.lists(st.tuples(st.integers(1, 100), st.floats(0.01, 10.0)), min_size=1, max_size=20)


@given(POINTS)
def test_no_point_of_the_front_is_beaten_and_every_other_one_is(points: list[tuple[int, float]]) -> None:
    kept = front(points)
    for peak, seconds in kept:
        assert not any(p <= peak and s <= seconds and (p, s) != (peak, seconds) for p, s in kept)
    for peak, seconds in points:
        assert any(p <= peak and s <= seconds for p, s in kept)


@given(POINTS, st.floats(1.0, SLOWEST_MODE))
def test_a_point_of_the_front_is_never_given_up_whatever_mode_it_began_in(
    points: list[tuple[int, float]], mode: float
) -> None:
    kept = front(points)
    for i, (peak, seconds) in enumerate(kept):
        others = kept[:i] + kept[i + 1 :]
        assert out_of_reach(seconds * mode, peak, others, slack(()) * (1 + 1e-12)) is None


def test_a_slow_point_is_given_up_only_against_what_needs_no_more_memory() -> None:
    known = [(10, 1.0), (20, 0.5)]
    assert out_of_reach(2.0, 10, known, 1.5) == (10, 1.0)
    assert out_of_reach(2.0, 9, known, 1.5) is None
    assert out_of_reach(1.4, 10, known, 1.5) is None
    assert out_of_reach(1.4, 20, known, 1.5) == (20, 0.5)


def test_repeats_that_scatter_more_than_the_modes_ask_for_more_slack() -> None:
    assert slack([1.1, 2.5]) == 2.5
    assert slack([1.1]) == SLOWEST_MODE
