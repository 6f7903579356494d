"""Proposals: new points only, all of a small space, away from where memory ended."""

from __future__ import annotations

import pytest

from tuner.proposals.samplers import Known, expected_latency_s, propose, told_constraints
from tuner.space import Config, Knob, Space, config_id

SPACE = Space(
    (
        Knob("engine", ("stream", "split")),
        Knob("chunks", (1, 2, 4, 8, 16, 32, 64), "ordered"),
        Knob("share", (0.25, 0.5, 0.75), "ordered", {"engine": ("split",)}),
    )
)
LIMIT = 1000


def _truth(config: Config) -> tuple[float | None, int]:
    """Few chunks are fast and do not fit."""
    chunks = int(config["chunks"])
    peak = 4000 // chunks
    latency = 1.0 + 0.1 * chunks + (0.3 if config["engine"] == "split" else 0.0)
    return (None if peak > LIMIT else latency), peak


def _search(strategy: str, trials: int, seed: int = 3) -> list[Known]:
    known: list[Known] = []
    while len(known) < trials:
        config = propose(strategy, SPACE, known, seed=seed, limit_bytes=LIMIT)
        if config is None:
            break
        latency, peak = _truth(config)
        known.append(
            Known(config, latency, None, peak if latency else None, ended=True, out_of_memory=latency is None)
        )
    return known


@pytest.mark.parametrize("strategy", ["grid", "random", "tpe", "gp"])
def test_every_point_of_a_small_space_is_proposed_once(strategy: str) -> None:
    space = Space((Knob("a", (1, 2, 3), "ordered"), Knob("b", ("x", "y"))))
    known: list[Known] = []
    while (config := propose(strategy, space, known, seed=0, limit_bytes=LIMIT)) is not None:
        known.append(Known(config, float(len(known) + 1), 10, 10, ended=len(known) % 2 == 0))
        assert len(known) <= 6
    assert len({config_id(k.config) for k in known}) == 6


@pytest.mark.parametrize("strategy", ["tpe", "gp"])
def test_samplers_leave_the_region_where_memory_ends(strategy: str) -> None:
    known = _search(strategy, 12)
    out = [k for k in known if k.out_of_memory]
    feasible = [k for k in known if k.latency_s is not None]
    assert min(k.latency_s or 9 for k in feasible) == pytest.approx(1.4)
    # a quarter of the space does not fit: 1 and 2 chunks of every engine and share
    assert len(out) <= 5
    assert len(known) == 12


@pytest.mark.parametrize("strategy", ["random", "tpe", "gp"])
def test_proposals_repeat_with_the_seed(strategy: str) -> None:
    assert [k.config for k in _search(strategy, 8)] == [k.config for k in _search(strategy, 8)]


def test_failed_and_live_trials_are_not_proposed_again() -> None:
    points = list(SPACE.grid())
    known = [Known(p, None, None, None, ended=i % 2 == 0, failed=True) for i, p in enumerate(points[:-1])]
    for strategy in ("tpe", "gp"):
        assert propose(strategy, SPACE, known, seed=0, limit_bytes=LIMIT) == points[-1]


def test_an_unmeasured_point_is_expected_to_be_like_its_neighbours() -> None:
    known = [
        Known({"engine": "stream", "chunks": c}, latency, None, None, ended=True)
        for c, latency in ((4, 4.0), (64, 64.0))
    ]
    assert expected_latency_s(SPACE, {"engine": "stream", "chunks": 2}, known) == 4.0
    assert expected_latency_s(SPACE, {"engine": "stream", "chunks": 32}, known) == 64.0
    assert expected_latency_s(SPACE, {"engine": "stream", "chunks": 2}, []) == 1.0


def test_constraints_are_told_of_every_trial_or_of_none() -> None:
    fine = Known({"engine": "stream", "chunks": 8}, 1.0, 600, 500, ended=True)
    lost = Known({"engine": "stream", "chunks": 2}, None, 900, None, ended=True, out_of_memory=True)
    refused = Known({"engine": "stream", "chunks": 1}, None, 4000, None, ended=True, out_of_memory=True)
    assert told_constraints([fine, fine], LIMIT) == [{}, {}]
    told = told_constraints([fine, lost], LIMIT)
    assert [set(one) for one in told] == [{"peak"}, {"peak"}]
    assert told[0]["peak"] == pytest.approx(-0.5)
    assert told[1]["peak"] > 0
    assert told_constraints([fine, refused], LIMIT)[1] == {"bound": 3.0, "peak": 3.0}


def test_a_gaussian_process_proposes_listed_points_only() -> None:
    listed = [c for c in SPACE.grid() if int(c["chunks"]) >= 8]
    known: list[Known] = []
    while (config := propose("gp", SPACE, known, seed=1, limit_bytes=LIMIT, points=listed)) is not None:
        known.append(Known(config, *_truth(config)[:1], None, 10, ended=True))
    assert sorted(config_id(k.config) for k in known) == sorted(map(config_id, listed))
