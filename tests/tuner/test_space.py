"""Spaces: every point once, one identity a point, wrong values named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.errors import RuleError
from tuner.space import Config, Knob, Space, config_id

SPACE = Space(
    (
        Knob("engine", ("stream", "split")),
        Knob("slots", (1, 2, 3), "ordered"),
        Knob("share", (0.25, 0.5), "ordered", {"engine": ("split",)}),
    )
)


def test_a_grid_holds_every_point_once_without_knobs_that_mean_nothing() -> None:
    points = list(SPACE.grid())
    assert len(points) == 3 + 3 * 2
    assert all(("share" in p) is (p["engine"] == "split") for p in points)
    assert len({config_id(p) for p in points}) == len(points)
    assert points[0] == {"engine": "stream", "slots": 1}


def test_shuffled_is_the_grid_in_an_order_of_its_seed() -> None:
    assert SPACE.shuffled(1) == SPACE.shuffled(1)
    assert SPACE.shuffled(1) != SPACE.shuffled(2)
    assert sorted(map(config_id, SPACE.shuffled(3))) == sorted(map(config_id, SPACE.grid()))


def test_an_empty_space_has_one_point() -> None:
    assert list(Space(()).grid()) == [{}]


values = st.one_of(st.integers(-5, 5), st.text(max_size=3), st.booleans())


@given(st.dictionaries(st.text(min_size=1, max_size=4), values, max_size=5), st.randoms())
def test_identity_does_not_depend_on_order(config: Config, rng: object) -> None:
    shuffled = dict(reversed(list(config.items())))
    assert config_id(shuffled) == config_id(config)


def test_identity_tells_values_apart_and_whole_floats_together() -> None:
    assert config_id({"a": 4}) == config_id({"a": 4.0})
    assert len({config_id(c) for c in ({"a": 4}, {"a": 5}, {"a": "4"}, {"b": 4}, {"a": 4.5}, {})}) == 6


def test_narrowed_replaces_values_and_keeps_the_rest() -> None:
    narrowed = SPACE.narrowed({"slots": [5, 2, 5]})
    assert narrowed.knob("slots").values == (5, 2)
    assert narrowed.knob("engine") == SPACE.knob("engine")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"engine": "stream", "slots": 9}, "values of its list"),
        ({"engine": "stream"}, "every active knob"),
        ({"engine": "split", "slots": 1}, "every active knob"),
        ({"engine": "stream", "slots": 1, "color": "red"}, "own knobs"),
    ],
)
def test_wrong_configurations_are_named(config: Config, said: str) -> None:
    with pytest.raises(RuleError, match=said):
        SPACE.check(config)
    assert SPACE.check({"slots": 1, "engine": "stream", "share": 0.5}) == {"engine": "stream", "slots": 1}


def test_wrong_spaces_are_refused() -> None:
    with pytest.raises(RuleError, match="at least one value"):
        Knob("a", ())
    with pytest.raises(RuleError, match="must be numbers"):
        Knob("a", ("x",), "ordered")
    with pytest.raises(RuleError, match="after the knobs they depend on"):
        Space((Knob("a", (1,), when={"b": (1,)}), Knob("b", (1,))))
    with pytest.raises(RuleError, match="own knobs"):
        SPACE.narrowed({"color": [1]})
