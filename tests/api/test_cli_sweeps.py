"""Sweeps by the command line: what cannot run is not stored, what stopped is found again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from api.cli import main
from db.repositories import SweepRepository
from db.session import Database
from tuner.sweep import create_sweep, parse_sweep

TINY: dict[str, Any] = {
    "operator": "ring_dtp",
    "target": {"ranks": 1, "device": "cpu"},
    "shape": {"tokens_per_rank": 32, "hidden": 8, "vocab": 64},
    "space": {"ring_mode": ["weights"], "strip_rows": [16, 32]},
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database_url: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLATPEAK_DATABASE", database_url)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps(TINY))
    return path


class Ran:
    """One command: its exit code and what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *words: object) -> None:
        capsys.readouterr()
        self.code = main([str(word) for word in words])
        self.out, self.err = capsys.readouterr()

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def listed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = Ran(capsys, "sweep", "list", "--json").json["items"]
    return items


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ({"ranks": 4096, "device": "cuda"}, "has room for"),
        ({"ranks": 2, "nodes": 2}, "one node, not 2"),
        ({"ranks": 1, "hardware_id": "another-cpu-x8-000000000000"}, "Here is "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_run_here_is_refused_and_not_stored(
    capsys: pytest.CaptureFixture[str], file: Path, target: dict[str, Any], says: str
) -> None:
    file.write_text(json.dumps({**TINY, "target": target}))
    ran = Ran(capsys, "sweep", file, "--json")
    assert ran.code == 2
    said = json.loads(ran.err)
    assert says in said["remedy"]
    assert "--enqueue" in said["remedy"]
    assert listed(capsys) == []
    assert Ran(capsys, "sweep", file, "--enqueue", "--json").json["state"] == "queued"
    assert Ran(capsys, "sweep", file, "--resume", "--json").code == 2


def test_resume_takes_the_newest_unfinished_sweep(
    capsys: pytest.CaptureFixture[str], database: Database, file: Path
) -> None:
    older, stopped, newest = (create_sweep(database, parse_sweep(TINY)) for _ in range(3))
    with database.session() as session:
        for sweep_id in (older, newest):
            SweepRepository(session).cancel(sweep_id)
        SweepRepository(session).pause(stopped, "three trials failed")
    done = Ran(capsys, "sweep", file, "--resume", "--json")
    assert done.code == 0
    assert (done.json["id"], done.json["state"]) == (stopped, "succeeded")
    assert done.json["trials"] == {"succeeded": 2}
    # nothing is unfinished now, and the newest was cancelled
    refused = Ran(capsys, "sweep", file, "--resume", "--json")
    assert refused.code == 1
    assert json.loads(refused.err)["value"] == f"{newest} (cancelled)"
    assert "without --resume" in json.loads(refused.err)["remedy"]
    assert len(listed(capsys)) == 3


def test_a_file_run_anew_names_its_unfinished_sweep(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    first = Ran(capsys, "sweep", file, "--enqueue")
    assert first.err == ""
    (waiting,) = listed(capsys)
    second = Ran(capsys, "sweep", file, "--enqueue")
    assert f"`flatpeak sweep resume {waiting['id']}`" in second.err
    assert Ran(capsys, "sweep", file, "--enqueue", "--json").err == ""
    assert len(listed(capsys)) == 3


def test_a_sweep_is_resumed_by_its_id(
    capsys: pytest.CaptureFixture[str], database: Database, file: Path
) -> None:
    first = create_sweep(database, parse_sweep(TINY))
    create_sweep(database, parse_sweep(TINY))
    for _ in range(2):  # the second time it is only shown
        done = Ran(capsys, "sweep", "resume", first, "--json")
        assert (done.code, done.json["id"], done.json["trials"]) == (0, first, {"succeeded": 2})
    unknown = Ran(capsys, "sweep", "resume", "swp_none", "--json")
    assert unknown.code == 2
    assert json.loads(unknown.err)["value"] == "swp_none"
    bound = create_sweep(database, parse_sweep({**TINY, "target": {"ranks": 1, "hardware_id": "another"}}))
    assert Ran(capsys, "sweep", "resume", bound, "--json").code == 2
    assert Ran(capsys, "sweep", "cancel", bound).code == 0
    assert Ran(capsys, "sweep", "resume", bound, "--json").code == 1
