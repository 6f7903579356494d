"""Predictions for the paper's tables: committed, recomputable, and in line with what theory fixes exactly."""

from __future__ import annotations

import json

import pytest

from benchmarks.paper_cases import FOLDER, PAPER, cases, frozen_model, predictions
from benchmarks.paper_tables import compare, table


def committed() -> dict[str, dict[str, dict[str, float]]]:
    rows: dict[str, dict[str, dict[str, float]]] = json.loads(
        (FOLDER / "paper_tables.json").read_text(encoding="utf-8")
    )["cases"]
    return rows


def test_the_committed_predictions_are_the_frozen_models() -> None:
    again = predictions(frozen_model())["cases"]
    assert again.keys() == committed().keys()
    for name, row in committed().items():
        assert row["predicted"] == pytest.approx(again[name]["predicted"], rel=1e-6), name
        assert row["paper"] == again[name]["paper"]


def test_every_printed_figure_belongs_to_a_case() -> None:
    assert PAPER.keys() <= {case.id for case in cases()}


def test_the_materialised_head_is_predicted_to_the_printed_digits() -> None:
    for tokens in (16_384, 32_768):
        row = committed()[f"head {tokens} materialised float32"]
        assert row["predicted"]["peak_gib"] == pytest.approx(row["paper"]["peak_gib"], abs=1e-3)


def test_chunks_need_less_than_all_at_once_for_every_router() -> None:
    rows = committed()
    for profile in ("balanced", "skew:30/16", "skew:50/16", "skew:80/16"):
        whole = rows[f"dispatch {profile} llep"]["predicted"]
        chunked = rows[f"dispatch {profile} flatpeak K=10 serial"]["predicted"]
        assert chunked["peak_gib"] < whole["peak_gib"] / 2
        assert chunked["forward_gib"] < whole["forward_gib"] / 2


def test_pairs_are_compared_and_written() -> None:
    rows = {
        "boundaries 0 of 47": {"predicted": {}, "measured": {"peak_gib": 48.0}, "paper": {}},
        "boundaries 21 of 47": {"predicted": {"fall_gib": 7.1}, "measured": {"peak_gib": 41.5}, "paper": {}},
        "head 16384 materialised float32": {"measured": {"forward_s": 1.0, "backward_s": 2.0}},
        "head 16384 flatpeak float32": {"measured": {"forward_s": 1.1, "backward_s": 2.2}},
        "optimizer host": {"predicted": {}, "not_run": "no time left"},
    }
    compare(rows)
    assert rows["boundaries 21 of 47"]["measured"]["fall_gib"] == 6.5  # type: ignore[index]
    ratio = rows["head 16384 flatpeak float32"]["measured"]["over_materialised"]  # type: ignore[index]
    assert ratio == pytest.approx(1.1)
    text = "\n".join(table(rows))
    assert "7.10 GiB" in text
    assert "6.50 GiB" in text
    assert "not run: no time left" in text
