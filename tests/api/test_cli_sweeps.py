"""Sweeps by the command line: what cannot run is not stored, what stopped is found again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from time import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.cli import main
from api.units import bytes_text, reason_text
from db.repositories import SweepRepository, TrialRepository
from db.session import Database
from db.tables import Attempt
from tests.api.seed import seed_sweep
from tuner.sweeping.sweep import create_sweep, parse_sweep
from tuner.sweeping.worker import worker_name

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


def many(database: Database, number: int) -> str:
    """A loopback sweep with so many trials that wait."""
    asked = {
        **TINY,
        "target": {"ranks": 1, "loopback": 4},
        "space": {"ring_mode": ["weights", "activations"], "strip_rows": list(range(1, 1 + number // 2))},
        "memory_limit_bytes": 4_000_000,
    }
    return create_sweep(database, parse_sweep(asked))


def test_a_sweep_shows_what_was_asked_and_that_more_trials_follow(
    capsys: pytest.CaptureFixture[str], database: Database
) -> None:
    sweep_id = many(database, 30)
    shown = Ran(capsys, "sweep", "show", sweep_id).out
    for words in ("1 of 4 × cpu (loopback)", "vocab=64", "grid, at most 30 launches", "3.81 MiB"):
        assert words in shown
    assert "Trials, the first 20 of 30" in shown
    assert f"10 more: flatpeak sweep show {sweep_id} --all" in shown
    assert shown.count("queued") == 20 + 2  # and the sweep, and the count
    cases: list[tuple[tuple[str, ...], int]] = [
        (("--all",), 30),
        (("--limit", "25"), 25),
        (("--limit", "40"), 30),
    ]
    for options, rows in cases:
        ran = Ran(capsys, "sweep", "show", sweep_id, *options).out
        assert ran.count("queued") == rows + 2
        assert ("more:" in ran) == (rows < 30)
    assert len(Ran(capsys, "sweep", "show", sweep_id, "--json").json["items"]) == 30
    assert "1 of 4 × cpu (loopback)" in Ran(capsys, "sweep", "list").out


def test_peaks_over_their_bounds_are_said(capsys: pytest.CaptureFixture[str], database: Database) -> None:
    seeded = seed_sweep(database)
    assert "exceed theirs" not in Ran(capsys, "sweep", "show", seeded.sweep_id).out
    with database.session() as session:
        trial = next(
            t for t in TrialRepository(session).of_sweep(seeded.sweep_id) if t.peak_bytes is not None
        )
        assert trial.peak_bytes is not None
        trial.bound_bytes = trial.peak_bytes - 3 * 2**20
    shown = Ran(capsys, "sweep", "show", seeded.sweep_id).out
    assert "1 of the peaks exceed theirs, by at most 3.00 MiB" in shown


@pytest.mark.parametrize("columns", ["40", "60", "80", None])
def test_no_word_of_a_table_is_broken_and_no_number_cut(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    database: Database,
    columns: str | None,
) -> None:
    if columns is None:  # a pipe: one line a trial
        monkeypatch.delenv("COLUMNS")
    else:
        monkeypatch.setenv("COLUMNS", columns)
    sweep_id = seed_sweep(database).sweep_id
    shown = Ran(capsys, "sweep", "show", sweep_id).out
    words = shown.split()
    assert words.count("succeeded") == 5 + 2
    assert words.count("exceeds") == 2
    assert "64.00 MiB" in " ".join(words) or columns == "40"
    if columns is None:
        assert "exceeds the limit of 64.00 MiB (Eq. 6)" in shown
        lines = [line for line in shown.splitlines() if line.startswith(tuple("01234567"))]
        assert len(lines) == 8


@given(st.integers(0, 2**60), st.integers(0, 2**60), st.integers(2, 120))
def test_reasons_keep_their_numbers_whole(bound: int, limit: int, most: int) -> None:
    said = f"its bound of {bound} bytes a rank exceeds the limit of {limit} bytes (Eq. 6)"
    whole = reason_text(said)
    if bound != limit and bytes_text(bound) == bytes_text(limit):
        assert whole == said
    else:
        assert whole.split()[3] == bytes_text(bound).split()[0] or bound < 1000
    cut = reason_text(said, most)
    assert len(cut) <= max(most, 2)
    if cut != whole:
        assert cut.endswith("…")
        assert set(cut.split()[:-1]) <= set(whole.split())


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    ran = Ran(capsys, *words, "--json")
    assert ran.code == 2
    said: dict[str, Any] = json.loads(ran.err)
    return said


def test_a_replay_names_what_there_is(
    capsys: pytest.CaptureFixture[str], database: Database, tmp_path: Path
) -> None:
    sweep_id = seed_sweep(database).sweep_id
    bogus = refused(capsys, "replay", sweep_id, "--where", "bogus=3")
    assert (bogus["value"], bogus["remedy"]) == ("bogus=3", "Knobs there are: ring_mode, strip_rows.")
    other = refused(capsys, "replay", sweep_id, "--where", "strip_rows=3")
    assert other["remedy"] == "Choose among 256, 512, 1024."
    alone = refused(capsys, "replay", sweep_id, "--where", "strip_rows=1024", "--where", "ring_mode=weights")
    assert "two points" in alone["rule"]
    assert "--where" in alone["remedy"]
    neither = refused(capsys, "replay", "nope")
    assert "CSV file" in neither["rule"]
    assert "id" in neither["rule"]
    assert "swp_" in neither["rule"]
    least = refused(capsys, "replay", sweep_id, "--memory-limit-bytes", "10")["remedy"]
    number = next(word for word in least.split() if word.isdigit())
    words = ("replay", sweep_id, "--strategy", "grid", "--seeds", "1", "--memory-limit-bytes")
    assert Ran(capsys, *words, number, "--json").code == 0
    refused(capsys, *words, int(number) - 1)


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "is empty"), (b"\x00\xff\xfe", "comma-separated"), (b'a,b\n"1,2\n3', "comma-separated")],
)
def test_a_file_that_is_no_table_is_told_in_our_words(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes, says: str
) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    assert says in refused(capsys, "replay", "a.csv")["remedy"]
    assert "Is a directory" in refused(capsys, "replay", ".")["remedy"]


@pytest.mark.parametrize(
    ("worker", "ended_before_s", "attended"),
    [
        ("elsewhere/1/1", None, True),  # it holds a trial
        (f"{worker_name().split('/')[0]}/4194305/1", None, False),  # it held one and is no more
        (worker_name(), None, False),  # this process asks, it does not work
        ("elsewhere/1/1", 5.0, True),  # between two trials
        ("elsewhere/1/1", 500.0, False),
    ],
)
def test_a_running_sweep_that_nobody_works_on_says_so(
    capsys: pytest.CaptureFixture[str],
    database: Database,
    worker: str,
    ended_before_s: float | None,
    attended: bool,
) -> None:
    sweep_id = seed_sweep(database, finish=False).sweep_id
    assert Ran(capsys, "sweep", "show", sweep_id, "--json").json["worked_on"] is None
    with database.session() as session:
        claim = TrialRepository(session).claim(worker)
        assert claim is not None
        SweepRepository(session).mark_running(sweep_id)
        if ended_before_s is not None:
            TrialRepository(session).release(claim, "told to stop")
            attempt = session.get_one(Attempt, claim.attempt.id)
            attempt.finished_at = (attempt.finished_at or time()) - ended_before_s
    assert Ran(capsys, "sweep", "show", sweep_id, "--json").json["worked_on"] is attended
    for words in (("sweep", "list"), ("sweep", "show", sweep_id)):
        assert ("running (nobody works on it)" in Ran(capsys, *words).out) is not attended


def test_a_worker_tells_its_progress_and_what_it_did(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    Ran(capsys, "sweep", file, "--enqueue")
    (waiting,) = listed(capsys)
    done = Ran(capsys, "worker", "--until-idle", "--json")
    lines = [json.loads(line) for line in done.err.splitlines()]
    assert [line["ended"] for line in lines][-2:] == [2, 2]
    assert lines[-1]["state"] == "succeeded"
    assert done.json["sweeps"] == [lines[-1]]
    assert (lines[-1]["sweep_id"], lines[-1]["trials"]) == (waiting["id"], {"succeeded": 2})
    assert Ran(capsys, "worker", "--until-idle").out == "Worked on nothing\n"
    Ran(capsys, "sweep", file, "--enqueue")
    assert re.fullmatch(r"Worked on swp_\w+ succeeded 2/2\n", Ran(capsys, "worker", "--until-idle").out)


def test_a_provider_without_knobs_says_so(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    file.write_text(json.dumps({**TINY, "provider": "materialised"}))
    said = refused(capsys, "sweep", file)
    assert said["value"] == "ring_mode"
    assert "none with this provider" in said["remedy"]
    assert listed(capsys) == []


def test_an_absent_cluster_file_is_told_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert "(No such file or directory)" in refused(capsys, "fit", "--cluster", "gone.yaml")["remedy"]
