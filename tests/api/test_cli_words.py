"""What a user types: groups with a default command, counts of tokens, unknown ids, values of the wrong kind."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.cli import main
from api.cli.amounts import tokens_of
from api.cli.groups import first_positional
from api.cli.plan import pins_from_words
from api.cli.sweep_live import progress_note
from api.errors import _LISTS, NotFound, RuleError, broken_rule, exit_code
from db.lifecycle import SweepState
from db.session import Database
from tests.api.seed import seed_cost_model, seed_sweep
from tuner.sweeping.sweep import SweepProgress, progress_of

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "examples" / "models" / "gpt-oss-20b.json")
PLAN = ("plan", "--model", MODEL, "--cluster", "hgx-h200")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLATPEAK_DATABASE", raising=False)
    monkeypatch.setenv("COLUMNS", "200")


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main([*words, "--json"])
    out, err = capsys.readouterr()
    assert out == ""
    return code, json.loads(err)


UNKNOWN = (
    ["export", "pln_none"],
    ["plan", "show", "pln_none"],
    [*PLAN, "--context", "1K", "--global-batch-tokens", "1K", "--cost-model", "cm_none"],
    ["sweep", "show", "swp_none"],
    ["sweep", "cancel", "swp_none"],
    ["replay", "swp_none"],
    ["fit", "--sweep", "swp_none"],
    ["token", "revoke", "tok_none"],
)


@pytest.mark.parametrize("words", UNKNOWN, ids=lambda words: " ".join(words[:2]))
def test_an_unknown_id_is_wrong_use_and_the_remedy_a_command(
    capsys: pytest.CaptureFixture[str], database: Database, database_url: str, words: list[str]
) -> None:
    code, said = refused(capsys, *words, "--database", database_url)
    assert code == 2
    assert said["value"].endswith("_none")
    assert "must exist" in said["rule"]
    (command,) = re.findall(r"`flatpeak ([^`]+)`", said["remedy"])
    assert main([*command.split(), "--database", database_url]) == 0


@pytest.mark.parametrize("thing", sorted(_LISTS))
def test_every_thing_has_a_remedy_for_every_way_in(thing: str) -> None:
    error = NotFound(thing, "x")
    shell = broken_rule(error, in_shell=True)
    assert shell is not None
    assert "flatpeak" in shell[2]
    assert "GET" not in shell[2] + error.on_page
    assert exit_code(error) == 2


def test_no_remedy_of_the_lower_rooms_speaks_of_one_way_in() -> None:
    for room in ("api/services", "cost_model", "tuner", "db"):
        for file in (ROOT / room).rglob("*.py"):
            assert not re.search(r"remedy=.*GET /", file.read_text()), file


def test_plans_that_were_kept_are_listed_and_shown(
    capsys: pytest.CaptureFixture[str], database: Database, database_url: str
) -> None:
    words = ["plan", "--model", MODEL, "--cluster", "hgx-h200", "--nodes", "1", "--save"]
    tokens = ["--context", "128K", "--global-batch-tokens", "512k"]
    assert main([*words, *tokens, "--database", database_url, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["workload"]["context_tokens"] == 131_072
    assert plan["workload"]["global_batch_tokens"] == 524_288
    assert main(["plan", "list", "--database", database_url, "--json"]) == 0
    assert [one["id"] for one in json.loads(capsys.readouterr().out)["items"]] == [plan["id"]]
    assert main(["plan", "--database", database_url, "list"]) == 0
    assert plan["id"] in capsys.readouterr().out
    assert main(["plan", "show", plan["id"], "--database", database_url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == plan
    assert main(["plan", "show", plan["id"], "--database", database_url]) == 0
    assert capsys.readouterr().out.startswith("fits  in expected mode")


def test_cost_models_are_listed(
    capsys: pytest.CaptureFixture[str], database: Database, database_url: str
) -> None:
    model_id = seed_cost_model(database, {})
    assert main(["fit", "list", "--database", database_url]) == 0
    assert model_id in capsys.readouterr().out
    assert main(["fit", "--database", database_url, "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["items"][0]["id"] == model_id


def test_options_may_stand_before_the_word_that_names_the_command(
    capsys: pytest.CaptureFixture[str], database: Database, database_url: str
) -> None:
    made = seed_sweep(database).sweep_id
    for words in (["--database", database_url, "list"], [f"--database={database_url}", "list"]):
        assert main(["sweep", *words, "--limit", "3"]) == 0
        assert made in capsys.readouterr().out
    assert main(["sweep", "--database", database_url, "show", made]) == 0
    capsys.readouterr()
    code, said = refused(capsys, "sweep", "--database", database_url, "list.yaml")
    assert (code, said["value"]) == (2, "list.yaml")


@given(
    before=st.lists(st.sampled_from(["--json", "--limit=3", "-x"])),
    value=st.text("abc-/:", min_size=1).filter(lambda text: not text.startswith("-")),
)
def test_the_first_positional_is_never_an_options_value(before: list[str], value: str) -> None:
    words = [*before, "--database", value, "list", "more"]
    place = first_positional(words, {"--database"})
    assert place is not None
    assert words[place] == "list"
    assert first_positional(words[:-2], {"--database"}) is None
    assert first_positional([*words[:-2], "--", "-list"], {"--database"}) == len(words) - 1


@given(st.integers(0, 10**12))
def test_tokens_are_read_as_they_are_written(count: int) -> None:
    assert tokens_of(str(count), "--context") == count
    for suffix, size in (("K", 1024), ("k", 1024), ("M", 2**20), ("m", 2**20)):
        assert tokens_of(f"{count}{suffix}", "--context") == count * size


@pytest.mark.parametrize("text", ["", "K", "12Q", "1.5K", "-1", "1e5", "128 K", "²", "٣", "9" * 5000, "0x10"])
def test_what_is_no_count_of_tokens_is_refused(capsys: pytest.CaptureFixture[str], text: str) -> None:
    words = ["plan", "--model", MODEL, "--cluster", "hgx-h200", f"--context={text}"]
    code, said = refused(capsys, *words, "--global-batch-tokens", "1K")
    assert code == 2
    assert said["rule"] == "--context must be a whole number of tokens"
    assert "128K" in said["remedy"]


def test_pins_take_counts_and_are_refused_by_their_rule() -> None:
    assert pins_from_words(["chunk_tokens=8K", "expert_degree=8"]) == {
        "chunk_tokens": 8192,
        "expert_degree": 8,
    }
    cases = {
        "foo=1": "--fix holds launch keys fast",
        "expert_degree=x": "--fix expert_degree must be a whole number",
        "staging_slots=0": "--fix staging_slots must be at least 1",
        "ring_mode=round": "--fix ring_mode must be 'activations' or 'weights'",
        "chunk_tokens=many": "--fix chunk_tokens must be a whole number of tokens",
        "expert_degree": "--fix takes KEY=VALUE, each key once",
    }
    for word, rule in cases.items():
        with pytest.raises(RuleError) as error:
            pins_from_words([word])
        assert error.value.rule == rule


@pytest.mark.parametrize(
    ("words", "rule", "value"),
    [
        (["sweep", "list", "--limit", "0"], "--limit must be at least 1", "0"),
        (["sweep", "list", "--limit", "many"], "--limit must be a whole number", "many"),
        (["plan", "--imbalance", "x"], "--imbalance must be a number", "x"),
        (["plan", "--mode", "maybe"], "--mode must be one of 'expected', 'guarantee'", "maybe"),
        (["serve", "--port", "70000"], "--port must be at most 65535", "70000"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_value_of_the_wrong_kind_is_told_by_its_rule(
    capsys: pytest.CaptureFixture[str], words: list[str], rule: str, value: str
) -> None:
    code, said = refused(capsys, *words)
    assert (code, said["rule"], said["value"]) == (2, rule, value)
    assert "--help" in said["remedy"]


def test_progress_names_states_and_the_best(database: Database) -> None:
    now = progress_of(database, seed_sweep(database).sweep_id)
    assert progress_note(now) == "failed 1 infeasible 2 succeeded 5 · best 44.9 ms"
    waiting = SweepProgress("swp_1", SweepState.QUEUED, None, {"queued": 3}, 3, None, None)
    assert progress_note(waiting) == ""
