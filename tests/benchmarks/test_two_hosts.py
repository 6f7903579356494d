"""What is kept of the sweeps over two hosts: a fingerprint a rate, and recommendations that differ as theory says."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from benchmarks.two_hosts import COLUMNS, RATES, SPACES, beside, main, numbered, sweep_file
from benchmarks.two_hosts_report import FOLDER, AtRate, at_rate, carried, read, report
from tuner.sweeping.sweep_spec import parse_sweep


@pytest.fixture(scope="module")
def found() -> dict[str, AtRate]:
    return {rate: at_rate(rate, read(FOLDER, rate)) for rate in RATES}


def test_every_rate_has_every_point_under_a_fingerprint_of_its_own(found: dict[str, AtRate]) -> None:
    assert len({one.hardware_id for one in found.values()}) == len(RATES)
    for rate in RATES:
        rows = read(FOLDER, rate)
        assert tuple(rows.columns) == COLUMNS
        assert set(rows["rank"]) == {0, 1}
        assert rows["shape_json"].str.contains('"nodes":2').all()
        for operator, points in (("pipelined_llep", 13), ("ring_dtp", 9)):
            mine = rows[rows["operator"] == operator]
            assert mine["config_json"].nunique() == points
            assert (mine.groupby(["config_json", "pass", "rank"])["repeat"].nunique() >= 3).all()


def test_a_faster_link_wants_larger_chunks_and_fewer(found: dict[str, AtRate]) -> None:
    assert [found[rate].launch["max_chunks"] for rate in RATES] == [4, 2, 1]
    assert [found[rate].launch["chunk_tokens"] for rate in RATES] == [256, 512, 1024]
    # at the slowest rate K = 4 and 8 tie
    assert [found[rate].fitted_launch["max_chunks"] for rate in RATES] == [8, 2, 1]
    assert [found[rate].fitted_launch["chunk_tokens"] for rate in RATES] == [128, 512, 1024]
    assert all(found[rate].recommended["pipelined_llep"].median_error < 0.04 for rate in RATES)
    by_chunks = [found[rate].recommended["pipelined_llep"].by_knob for rate in RATES]
    gains = [points[1] / min(points.values()) for points in by_chunks]
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] < 1.1 < gains[0]


def test_a_fit_at_one_rate_tells_how_another_differs(found: dict[str, AtRate]) -> None:
    slow, middle, fast = (found[rate] for rate in RATES)
    for here, chunks, mode in ((slow, 2, "activations"), (fast, 1, "gather")):
        told = carried(middle, here)
        assert told["pipelined_llep"]["chunks"] == chunks
        assert told["ring_dtp"]["ring_mode"] == mode


def test_a_slow_link_moves_fewer_bytes_and_a_fast_one_multiplies_less(found: dict[str, AtRate]) -> None:
    assert found["100mbit"].launch["ring_mode"] == "activations"
    assert found["1gbit"].launch["ring_mode"] == found["10gbit"].launch["ring_mode"] == "gather"


def test_the_fit_finds_the_order_of_the_links(found: dict[str, AtRate]) -> None:
    for name in ("all_to_all_cluster_bytes_per_s", "ring_cluster_bytes_per_s"):
        speeds = [found[rate].network_bytes_per_s[name] for rate in RATES]
        assert speeds == sorted(speeds)


def test_the_table_names_every_rate() -> None:
    text = report(FOLDER, RATES)
    assert all(f"| {rate} |" in text for rate in RATES)


def test_repeats_count_on_from_round_to_round() -> None:
    row = {"operator": "ring_dtp", "shape_json": "{}", "config_json": "{}", "pass": "forward", "rank": 0}
    frame = pd.DataFrame([{**row, "repeat": repeat % 3} for repeat in range(6)], columns=list(COLUMNS))
    assert list(numbered(frame)["repeat"]) == list(range(6))


@pytest.mark.parametrize("operator", sorted(SPACES))
def test_the_sweeps_are_sweeps(operator: str) -> None:
    spec = parse_sweep(sweep_file(operator, repeats=3, seed=1))
    assert (spec.target.ranks, spec.target.nodes) == (2, 2)


def test_one_operator_measured_again_leaves_the_other_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, path = read(FOLDER, "10gbit"), tmp_path / "10gbit.csv.gz"
    dispatch, head = (rows[rows["operator"] == name] for name in ("pipelined_llep", "ring_dtp"))
    beside(path, dispatch).to_csv(path, index=False)
    main(["--report", "--rates", "10gbit", "--out", str(tmp_path)])
    assert "rows are missing of {'10gbit': ['ring_dtp']}" in capsys.readouterr().out
    beside(path, head).to_csv(path, index=False)
    again = beside(path, dispatch.head(8))
    assert again["operator"].value_counts().to_dict() == {"ring_dtp": len(head), "pipelined_llep": 8}
