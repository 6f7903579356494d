"""Replayed recordings: pooled and worst table, curves of runs that stopped, rows kept and found again."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd

from benchmarks.replay_strategies import (
    COLUMNS,
    Row,
    curve_of,
    digest,
    limit_of,
    read_runs,
    summary,
    tasks,
    write_runs,
    write_tables,
)
from tests.tuner import recorded
from tuner.replaying.table import tables


def row(table: str, seed: int, reached: str, regret: str = "inf 0.50000", infeasible: str = "0") -> Row:
    told = (
        "head",
        table,
        "abc",
        "10",
        "limit",
        "model",
        str(seed),
        "3",
        reached,
        "2",
        infeasible,
        "0",
        regret,
    )
    return dict(zip(COLUMNS, told, strict=True))


def test_a_recording_is_its_tables_together_and_its_worst_one() -> None:
    rows = [row("0", seed, "1") for seed in range(3)] + [row("1", seed, "") for seed in range(2)]
    rows[4]["infeasible"] = "2"
    found = summary(rows)
    assert (found["points"], found["tables"], found["runs"]) == (20, 2, 5)
    assert (found["reached_median"], found["reached_worst_table"], found["missed"]) == (1, 4, 2)
    assert found["infeasible_most"] == 2


def test_a_run_that_stopped_stays_where_it_was() -> None:
    curve = curve_of([row("0", 0, "2")])
    assert math.isinf(curve[0])
    assert curve[1:] == [0.5, 0.5]


def test_rows_are_found_again_and_files_are_written_from_them(tmp_path: Path) -> None:
    rows = [row("0", seed, "2") for seed in (10, 2)]
    write_runs(rows, tmp_path / "runs.csv.gz")
    assert read_runs(tmp_path / "runs.csv.gz") == rows[::-1]
    assert read_runs(tmp_path / "none.csv.gz") == []
    write_tables(rows, tmp_path)
    assert "head,limit,model,10,1,2,2" in (tmp_path / "strategies.csv").read_text(encoding="utf-8")
    assert pd.read_csv(tmp_path / "curves.csv")["regret"].tolist()[1:] == [0.5, 0.5]
    assert "<svg" in (tmp_path / "strategies.svg").read_text(encoding="utf-8")


def test_every_table_gets_every_seed_and_a_new_recording_is_another_one() -> None:
    samples = recorded.rows("ring_dtp", recorded.HEAD, recorded.head_points()[::3])
    made = list(tasks("head", samples, strategies=["random"], cases=["limit"], seeds=3, trials=4))
    assert [task.seeds for task in made] == [(0, 1, 2)]
    rows = made[0].run()
    assert [r["seed"] for r in rows] == ["0", "1", "2"]
    [table] = tables(samples)
    assert rows[0]["digest"] == digest(table) == digest(made[0].table)
    [other] = tables(recorded.rows("ring_dtp", recorded.HEAD, recorded.head_points()[::3], seed=1))
    assert digest(other) != digest(table)
    assert limit_of(table) >= min(p.bound_bytes or 0 for p in table.points)
