"""The command line: what it prints, what it returns, how it refuses."""

from __future__ import annotations

import json
import socket
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from api.cli import main
from api.cli.fit import finite
from api.cli.serve import serve
from cost_model.cluster_file import cluster_to_mapping
from cost_model.presets import preset
from db.session import Database
from tests.api.seed import seed_sweep, spec

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "examples" / "models"
PLAN = ["plan", "--model", str(MODELS / "gpt-oss-20b.json"), "--cluster", "hgx-h200", "--nodes", "1"]
WORK = ["--context", "131072", "--global-batch-tokens", "524288"]
COMMANDS = (
    ["plan"],
    ["check"],
    ["sweep", "run"],
    ["sweep", "list"],
    ["sweep", "show"],
    ["sweep", "cancel"],
    ["fit"],
    ["export"],
    ["probe"],
    ["serve"],
    ["worker"],
    ["db", "migrate"],
    ["db", "check"],
    ["token", "create"],
    ["token", "list"],
    ["token", "revoke"],
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLATPEAK_DATABASE", raising=False)
    monkeypatch.setenv("COLUMNS", "200")


class Ran:
    """One command: its exit code and what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> None:
        capsys.readouterr()
        self.code = main(list(arguments))
        self.out, self.err = capsys.readouterr()

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def refusal(self) -> dict[str, Any]:
        """The one JSON object on stderr; nothing else is printed."""
        assert self.out == ""
        body: dict[str, Any] = json.loads(self.err)
        assert set(body) == {"rule", "value", "remedy"}
        assert body["rule"]
        assert body["remedy"]
        return body


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_teaches_with_an_example_and_has_json(
    capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    ran = Ran(capsys, *command, "--help")
    assert ran.code == 0
    assert "Example:" in ran.out
    assert f"flatpeak {command[0]}" in ran.out
    assert "--json" in ran.out


def test_a_sweep_file_before_help_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    asked = Ran(capsys, "sweep", "mine.yaml", "--help")
    assert asked.code == 0
    assert "--resume" in asked.out
    assert "flatpeak sweep FILE" in Ran(capsys, "sweep", "--help").out


def test_the_port_of_the_readme_is_the_default() -> None:
    readme = (ROOT / "README.md").read_text()
    port = signature(serve).parameters["port"].default
    assert f"flatpeak serve                           # http://127.0.0.1:{port}/" in readme


def test_no_command_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert Ran(capsys).code == 2
    assert Ran(capsys, "sweep").code == 2
    assert Ran(capsys, "fly", "--json").refusal["value"] == "fly --json"


def test_the_verdict_is_one_line_however_narrow_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    first = Ran(capsys, *PLAN, *WORK).out.splitlines()[0]
    assert first.startswith("fits  in expected mode")
    assert first.endswith(")")
    assert " a step (" in first


def test_a_plan_that_fits(capsys: pytest.CaptureFixture[str], tmp_path: Path, database_url: str) -> None:
    ran = Ran(capsys, *PLAN, *WORK, "--save", "--database", database_url, "--json")
    assert ran.code == 0
    plan = ran.json
    assert plan["verdict"] == "fits"
    assert plan["id"].startswith("pln_")
    text = Ran(capsys, *PLAN, *WORK)
    assert text.code == 0
    assert text.out.startswith("fits  in expected mode")
    assert "weights grads" in text.out
    launch = tmp_path / "launch.json"
    exported = Ran(capsys, "export", plan["id"], "--database", database_url, "-o", str(launch), "--json")
    assert exported.json == {"format": "launch", "file": str(launch)}
    assert json.loads(launch.read_text())["launch"] == plan["launch"]
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps(plan))
    assert Ran(capsys, "export", str(saved)).json["launch"] == plan["launch"]
    checked = Ran(capsys, "check", str(launch), *PLAN[1:], *WORK, "--json")
    assert checked.code == 0
    assert checked.json["expected"]["footprint_bytes"] == plan["memory"]["footprint_bytes"]
    assert "footprint" in Ran(capsys, "check", str(launch), *PLAN[1:], *WORK).out
    wide = Ran(capsys, "check", str(launch), *PLAN[1:], *WORK, "--activation-bytes", "4", "--json")
    assert wide.json["expected"]["footprint_bytes"] > checked.json["expected"]["footprint_bytes"]


def test_a_plan_that_does_not_fit_says_what_would(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mapping = cluster_to_mapping(preset("hgx-h200", 1))
    mapping["gpu"]["hbm_bytes"] = 5 * 2**30
    (tmp_path / "small.json").write_text(json.dumps(mapping))
    ran = Ran(capsys, "plan", *PLAN[1:3], "--cluster", "small.json", *WORK, "--json")
    assert ran.code == 1
    assert ran.json["verdict"] == "does_not_fit"
    assert ran.json["what_would_fit"]


def test_wrong_input_is_refused_by_rule_value_and_remedy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"hidden_size": 4096,\n "x" 1}')
    none = tmp_path / "none.yaml"
    none.write_text("name: none\nnodes: 0\n")
    cases = {
        "missing": [*PLAN[:1], "--model", "gone.json", *PLAN[3:], *WORK],
        "line 2": [*PLAN[:1], "--model", str(broken), *PLAN[3:], *WORK],
        "nodes": [*PLAN[:3], "--cluster", str(none), *WORK],
        "hgx-none": [*PLAN[:3], "--cluster", "hgx-none", *WORK],
        "multiple": [*PLAN, "--context", "131072", "--global-batch-tokens", "131073"],
        "cm_none": [*PLAN, *WORK, "--cost-model", "cm_none"],
        "sweep file": ["sweep", "gone.yaml"],
        "launch file": ["check", "gone.json", *PLAN[1:], *WORK],
    }
    for word, arguments in cases.items():
        ran = Ran(capsys, *arguments, "--json")
        assert ran.code == 2, word
        if word != "missing":
            assert word in json.dumps(ran.refusal)
    assert not (tmp_path / "flatpeak.db").exists()


def test_errors_for_people_are_three_lines(capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, "plan", "--model", "gone.json", *PLAN[3:], *WORK)
    assert [line.split()[0] for line in ran.err.splitlines()] == ["Error", "Value", "Remedy"]


def test_an_unreachable_database_fails_without_its_password(capsys: pytest.CaptureFixture[str]) -> None:
    url = "postgresql+psycopg://me:secret@127.0.0.1:1/none"
    for command in (["db", "check"], ["db", "migrate"], ["token", "list"], ["sweep", "list"], ["worker"]):
        ran = Ran(capsys, *command, "--database", url, "--json")
        assert ran.code == 1, command
        assert "reachable" in ran.refusal["rule"]
        assert "secret" not in ran.err


def test_a_port_in_use_is_named(capsys: pytest.CaptureFixture[str], database_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ran = Ran(capsys, "serve", "--port", port, "--database", database_url, "--json")
    assert ran.code == 1
    assert ran.refusal["value"] == f"127.0.0.1:{port}"


def test_serving_others_without_a_token_is_refused(
    capsys: pytest.CaptureFixture[str], database_url: str
) -> None:
    ran = Ran(capsys, "serve", "--host", "0.0.0.0", "--port", "0", "--database", database_url, "--json")
    assert ran.code == 2
    assert "flatpeak token create" in ran.refusal["remedy"]


def test_a_first_start_makes_one_token_and_prints_it_once(
    capsys: pytest.CaptureFixture[str], database_url: str
) -> None:
    words = ("token", "create", "--if-none", "--database", database_url, "--json")
    first = Ran(capsys, *words).json
    assert first["token"].startswith("fp_")
    assert Ran(capsys, *words).json == {"token": None}
    assert Ran(capsys, "token", "revoke", first["id"], "--database", database_url).code == 0
    assert Ran(capsys, *words).json["token"].startswith("fp_")


def test_tokens_are_made_listed_and_revoked(capsys: pytest.CaptureFixture[str], database_url: str) -> None:
    made = Ran(
        capsys, "token", "create", "--name", "ci", "--scope", "read", "--database", database_url, "--json"
    ).json
    assert made["token"].startswith("fp_")
    listed = Ran(capsys, "token", "list", "--database", database_url, "--json")
    assert made["token"] not in listed.out
    assert [item["id"] for item in listed.json["items"]] == [made["id"]]
    assert Ran(capsys, "token", "revoke", made["id"], "--database", database_url).code == 0
    assert Ran(capsys, "token", "revoke", made["id"], "--database", database_url).code == 1
    wrong = Ran(capsys, "token", "create", "--scope", "fly", "--database", database_url, "--json")
    assert wrong.code == 2
    assert wrong.refusal["value"] == ["fly"]


def test_a_database_is_migrated_and_checked(capsys: pytest.CaptureFixture[str], database_url: str) -> None:
    before = Ran(capsys, "db", "check", "--database", database_url, "--json")
    assert before.code == 1
    assert Ran(capsys, "db", "migrate", "--database", database_url).code == 0
    assert Ran(capsys, "db", "check", "--database", database_url, "--json").json["ok"] is True


def test_sweeps_are_listed_shown_and_cancelled(
    capsys: pytest.CaptureFixture[str], database: Database, database_url: str
) -> None:
    done = seed_sweep(database)
    waiting = seed_sweep(database, finish=False)
    listed = Ran(capsys, "sweep", "list", "--database", database_url, "--json").json
    assert [item["id"] for item in listed["items"]] == [waiting.sweep_id, done.sweep_id]
    shown = Ran(capsys, "sweep", "show", done.sweep_id, "--database", database_url)
    assert "45.0 ms" in shown.out or "44.9 ms" in shown.out
    assert shown.out.startswith(f"{done.sweep_id}  ")
    assert (
        len(Ran(capsys, "sweep", "show", done.sweep_id, "--database", database_url, "--json").json["items"])
        == 8
    )
    assert Ran(capsys, "sweep", "cancel", waiting.sweep_id, "--database", database_url).code == 0
    assert Ran(capsys, "sweep", "cancel", waiting.sweep_id, "--database", database_url).code == 1
    assert Ran(capsys, "sweep", "show", "swp_none", "--database", database_url, "--json").code == 2


def test_an_id_stays_whole_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    database: Database,
    database_url: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = seed_sweep(database)
    for words in (("sweep", "list"), ("sweep", "show", done.sweep_id)):
        assert done.sweep_id in Ran(capsys, *words, "--database", database_url).out.split()


def test_a_queued_sweep_is_resumed_by_its_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, database_url: str
) -> None:
    file = tmp_path / "sweep.json"
    file.write_text(json.dumps(spec()))
    run = ["sweep", str(file), "--enqueue", "--database", database_url, "--json"]
    first = Ran(capsys, *run).json
    assert first["state"] == "queued"
    assert Ran(capsys, *run, "--resume").json["id"] == first["id"]
    assert Ran(capsys, *run).json["id"] != first["id"]


def test_a_first_fit_asks_for_the_cluster(
    capsys: pytest.CaptureFixture[str], database: Database, database_url: str
) -> None:
    nothing = Ran(capsys, "fit", "--database", database_url, "--json")
    assert nothing.code == 2
    assert "flatpeak sweep" in nothing.refusal["remedy"]
    seed_sweep(database)
    unknown = Ran(capsys, "fit", "--database", database_url, "--json")
    assert unknown.code == 2
    assert "flatpeak probe" in unknown.refusal["remedy"]


def test_reports_hold_no_nan() -> None:
    assert finite({"a": [float("nan"), 1.0], "b": (float("inf"),)}) == {"a": [None, 1.0], "b": [None]}
