"""The benchmark's own claims on a CPU: the peak falls as its phases predict, the bits stay, rows are complete."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from benchmarks.checkpoint_offload import main, race_check
from benchmarks.rows import COLUMNS


def test_the_peak_falls_as_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.csv"
    sizes = ["--tokens", "128", "--sequence", "64", "--layers", "3", "--repeats", "1"]
    assert main(["--tiny", *sizes, "--out", str(out)]) == 0
    assert not torch.are_deterministic_algorithms_enabled()
    lines = capsys.readouterr().out.splitlines()
    table = [line.split() for line in lines if line.endswith((" same", " DIFFER"))]
    assert [row[0] for row in table] == ["keep", "0", "25", "50", "75", "100", "keep"]
    falls = []
    for row in table:
        cells = row[2:] if row[0] != "keep" else row[1:]
        assert cells[-1] == "same"
        assert float(cells[5].rstrip("%")) < 1.0
        falls.append(int(cells[0]))
    assert falls == [0, 0, 1, 2, 3, 4, 0]
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 7
    assert list(rows[0]) == COLUMNS
    peaks = [int(row["allocated_bytes"]) for row in rows]
    assert peaks[0] == peaks[1] == peaks[6]
    assert peaks[1] > peaks[2] > peaks[3] > peaks[4] > peaks[5]


def test_tokens_that_make_no_whole_sequences_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--tiny", "--tokens", "100", "--sequence", "64"])
    assert "no multiple" in capsys.readouterr().err


def test_late_copies_self_check_on_a_cpu() -> None:
    assert race_check(torch.device("cpu"))
