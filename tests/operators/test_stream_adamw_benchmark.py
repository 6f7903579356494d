"""The benchmark runs where there is no GPU, checks itself, and writes rows in the project's form."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from benchmarks.rows import COLUMNS
from benchmarks.stream_adamw import main


def test_the_tiny_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.csv"
    assert main(["--tiny", "--params", "200000", "--repeats", "1", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "NOT" not in printed
    assert "of the two-way link" in printed
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == COLUMNS
    steps = [json.loads(r["config_json"]) for r in rows if r["pass"] == "step"]
    assert {c["engine"] for c in steps} == {"stream", "host", "split", "device"}
    assert {r["provider"] for r in rows} >= {"flatpeak", "torch", "host", "link"}
    for row in rows:
        config = json.loads(row["config_json"])
        assert config["active_gpus"] == 1
        assert float(row["seconds"]) > 0
        if row["provider"] == "flatpeak" and config["engine"] == "stream":
            staging = 16 * config["bucket_params"] * config["staging_slots"]
            assert staging <= int(row["allocated_bytes"]) <= staging + 4096


def test_the_study_of_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.csv"
    arguments = ["--tiny", "--study", "split", "--params", "100000", "--repeats", "1", "--out", str(out)]
    assert main(arguments) == 0
    assert "of the better alone" in capsys.readouterr().out
    with out.open() as file:
        rows = list(csv.DictReader(file))
    steps = [json.loads(r["config_json"]) for r in rows if r["provider"] == "flatpeak"]
    assert {c["engine"] for c in steps} == {"stream", "host", "split"}
    assert len({c["host_share"] for c in steps if c["engine"] == "split"}) >= 8
    assert {"throttled", "past_caches", "lanes"} & {key for c in steps for key in c}
    assert {r["pass"] for r in rows if r["provider"] == "memory"} == {"scale"}
