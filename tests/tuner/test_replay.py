"""Replays: tables from rows, what counts as found, constraints told as constraints, the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from api.cli import main
from cost_model.errors import RuleError
from tests.tuner import recorded
from tuner.replaying.replay import STRATEGIES, Options, Told, replay
from tuner.replaying.table import Recorded, Table, read_samples, tables
from tuner.space import Config, Knob, Space

LIMIT = 1000
WAYS: tuple[Told, ...] = ("constraints", "fail")


def walled(most: int = 32) -> Table:
    """Fewer chunks are faster, and memory ends below eight of them: the best point stands at the wall."""
    space = Space((Knob("chunks", tuple(range(1, most + 1)), "ordered"), Knob("side", ("left", "right"))))

    def point(config: Config) -> Recorded:
        chunks = int(config["chunks"])
        seconds = 1.0 + 0.05 * chunks + (0.4 if config["side"] == "right" else 0.0)
        return Recorded(config, {"forward": (seconds,) * 3}, 8000 // chunks, None)

    points = tuple(point(config) for config in space.grid())
    return Table("walled", "flatpeak", {"rows": 1}, 1, recorded.HARDWARE, space, points)


def rows(**changed: Any) -> pd.DataFrame:
    base = {
        "operator": "ring_dtp", "provider": "flatpeak", "shape_json": json.dumps(recorded.HEAD),
        "pass": "forward", "rank": 0, "repeat": 0, "seconds": 1.0, "allocated_bytes": 5, "hardware_id": "x",
        "config_json": '{"ring_mode": "weights", "strip_rows": 64}',
    }  # fmt: skip
    return pd.DataFrame([{**base, **changed}])


def test_a_latency_is_the_slowest_rank_the_fast_mode_and_both_passes() -> None:
    parts = [
        rows(rank=rank, repeat=repeat, seconds=seconds, allocated_bytes=5 + rank)
        for repeat, pair in enumerate([(1.0, 2.0), (1.0, 2.1), (1.0, 2.2), (1.0, 9.0)])
        for rank, seconds in enumerate(pair)
    ]
    parts += [rows(repeat=repeat, seconds=3.0, **{"pass": "backward"}) for repeat in range(4)]
    parts.append(rows(config_json='{"ring_mode": "gather", "strip_rows": 64}', seconds=float("nan")))
    [one] = tables(pd.concat(parts), fewest=1)
    [point] = one.points
    assert point.seconds == {"forward": 2.1, "backward": 3.0}
    assert point.latency_s == pytest.approx(5.1)
    assert point.peak_bytes == 6
    assert point.bound_bytes is not None


def test_forward_alone_beside_both_passes_is_not_added() -> None:
    both = pd.concat([rows(seconds=1.0), rows(seconds=2.5, **{"pass": "forward_backward"})])
    [one] = tables(both, fewest=1)
    assert one.points[0].latency_s == 2.5


def test_every_shape_and_provider_is_a_table_of_its_own() -> None:
    other = json.dumps({**recorded.HEAD, "hidden": 128})
    found = tables(pd.concat([rows(), rows(shape_json=other), rows(provider="materialised")]), fewest=1)
    assert len(found) == 3
    assert len({one.name for one in found}) == 3


def test_a_knob_that_only_some_points_have_follows_the_one_that_explains_it() -> None:
    engines = [
        {"engine": "stream", "slots": 2},
        {"engine": "stream", "slots": 3},
        {"engine": "split", "slots": 2, "share": 0.5},
    ]
    [one] = tables(
        pd.concat([rows(operator="stream_adamw", config_json=json.dumps(c)) for c in engines]), fewest=1
    )
    assert one.space.knob("share").when == {"engine": ("split",)}
    assert {json.dumps(p.config) for p in one.points} <= {json.dumps(c) for c in one.space.grid()}
    [one] = tables(pd.concat([rows(config_json='{"a": 1}'), rows(config_json='{"a": 1, "b": 2}')]), fewest=1)
    assert sorted(str(p.config["b"]) for p in one.points) == ["2", "default"]


def test_only_some_points_of_a_recording() -> None:
    both = pd.concat([rows(), rows(config_json='{"ring_mode": "gather", "strip_rows": 64}')])
    [one] = tables(both, fewest=1, where={"ring_mode": "gather"})
    assert [p.config["ring_mode"] for p in one.points] == ["gather"]


def test_a_grid_replays_in_its_order_and_its_regret_never_grows() -> None:
    one = walled()
    summary = replay(one, "grid", Options(trials=64, limit_bytes=LIMIT, redraw=False), seeds=[0])
    run = summary.runs[0]
    assert list(run.launched) == list(one.space.grid())
    assert run.infeasible == 14
    assert summary.best_config == {"chunks": 8, "side": "left"}
    assert run.reached == 15
    assert list(run.regret) == sorted(run.regret, reverse=True)
    assert run.regret[-1] == 0.0
    assert not run.stopped


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_finds_the_best_point_of_a_small_table(strategy: str) -> None:
    samples = recorded.rows("ring_dtp", recorded.HEAD, recorded.head_points()[::4], noise=0.001)
    [one] = tables(samples)
    summary = replay(one, strategy, Options(trials=9, redraw=False), seeds=[0, 1])
    assert summary.missed == 0
    assert summary.final_regret_median < 0.02


def test_constraints_keep_a_sampler_out_of_the_region_where_memory_ends() -> None:
    """Told as failed, infeasible points teach nothing, and the sampler goes on falling over the wall.

    Here it stands at 32 chunks: half of the points lie beyond it.
    """
    told, failed = (
        replay(
            walled(64),
            "tpe",
            Options(trials=30, limit_bytes=LIMIT // 4, bounds="none", told=how),
            seeds=range(3),
        )
        for how in WAYS
    )
    assert told.infeasible_median <= 0.65 * failed.infeasible_median
    assert told.final_regret_median <= failed.final_regret_median


def test_seeds_differ_and_repeat() -> None:
    [one] = tables(recorded.rows("ring_dtp", recorded.HEAD, recorded.head_points(), noise=0.1))
    first, second, again = (
        replay(one, "random", Options(trials=5), seeds=[seed]).runs[0] for seed in (1, 2, 1)
    )
    assert first == again
    assert first.launched != second.launched


def test_what_cannot_be_replayed_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match="a strategy is one of"):
        replay(walled(), "guess", Options(), seeds=[0])
    with pytest.raises(RuleError, match="a point within the memory limit"):
        replay(walled(), "grid", Options(limit_bytes=1), seeds=[0])
    with pytest.raises(RuleError, match="is a CSV file"):
        read_samples(tmp_path / "none.csv")
    (tmp_path / "half.csv").write_text("operator,seconds\nx,1\n")
    with pytest.raises(RuleError, match="has the columns"):
        read_samples(tmp_path / "half.csv")
    with pytest.raises(RuleError, match="JSON objects"):
        tables(rows(config_json="{"), fewest=1)


def test_the_command_replays_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "head.csv"
    recorded.rows("ring_dtp", recorded.HEAD, recorded.head_points()[::3]).to_csv(path, index=False)
    arguments = [
        "replay",
        str(path),
        "--strategy",
        "model",
        "--strategy",
        "random",
        "--seeds",
        "2",
        "--trials",
        "4",
    ]
    assert main([*arguments, "--json"]) == 0
    items = json.loads(capsys.readouterr().out)["items"]
    assert [item["strategy"] for item in items] == ["model", "random"]
    assert all(len(item["regret_curve"]) == 4 and item["seeds"] == 2 for item in items)
    assert main([*arguments, "--where", "ring_mode=weights"]) == 0
    shown = capsys.readouterr().out
    assert "within 2 % after" in shown
    assert "4 of 4 points" in shown
    assert main(["replay", str(path), "--where", "ring_mode"]) == 2
    assert "KEY=VALUE" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "none.csv"), "--json"]) == 2
    assert "CSV" in json.loads(capsys.readouterr().err)["rule"]
