"""Wrong options of the benchmarks end before anything is measured, and name the option."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import gloo_exchange, record_sweeps


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--label x --repeats 0", "--repeats"),
        ("--label x --points -1", "--points"),
        ("--label x --ranks 0", "--ranks"),
        ("--label x --seconds nan", "--seconds"),
        ("--label x --seconds 0", "--seconds"),
        ("--label ../x", "--label"),
        ("--label x --nodes 2", "--nodes"),
        ("--label x --hosts 100mbit --device cuda", "--hosts"),
        ("--label x --hosts 100mbit --loopback 4", "--hosts"),
    ],
)
def test_recorded_sweeps(
    options: str,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["record_sweeps", "head", *options.split(), "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        record_sweeps.main()
    assert named in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", ["--bytes 0", "--repeats 1", "--out missing/x.csv"])
def test_exchanges(options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        gloo_exchange.main(["--out", "x.csv", *options.split()])
    assert list(tmp_path.iterdir()) == []
