"""Trials whose times are in doubt: shown wherever they are, and counted by a fit."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from sqlalchemy import update

from api.cli import main
from api.services.planning import measured_points
from cost_model.presets import preset
from db.repositories import SampleRepository, TrialRepository
from db.session import Database
from db.tables import Sample
from tests.api.conftest import Served
from tests.api.seed import HARDWARE, Seeded, seed_sweep, spec
from tests.tuner.test_environment import PROCESSES, answers
from tuner.measuring.environment import environment_of
from tuner.registry import load_adapter
from tuner.sweeping.next_point import _older
from tuner.sweeping.sweep_spec import parse_sweep


@pytest.fixture
def sweep(database: Database) -> Seeded:
    """A sweep of which two measured trials were not alone."""
    found = seed_sweep(database)
    nodes, flags = environment_of(answers(processes=PROCESSES, busy_core_s=100.0))
    with database.session() as session:
        measured = TrialRepository(session).of_sweep(found.sweep_id, state="succeeded")
        for trial in measured[:2]:
            trial.result_json = {
                **(trial.result_json or {}),
                "environment": nodes,
                "flags": [asdict(flag) for flag in flags],
            }
    return found


def _flagged(database: Database, sweep: Seeded) -> list[str]:
    with database.reading() as session:
        found = SampleRepository(session).flagged_trials()
        assert found <= set(sweep.trial_ids)
        return [trial for trial in sweep.trial_ids if trial in found]


def test_the_api_and_the_pages_say_what_was_wrong(served: Served, sweep: Seeded) -> None:
    flagged = _flagged(served.database, sweep)
    assert len(flagged) == 2
    items: list[dict[str, Any]] = served.client.get(f"/v1/sweeps/{sweep.sweep_id}/trials").json()["items"]
    assert [item["id"] for item in items if item["flags"]] == flagged
    detail = served.client.get(f"/v1/trials/{flagged[0]}").json()
    assert [flag["flag"] for flag in detail["flags"]] == ["busy_host", "shared_card"]
    assert detail["environment"][0]["cards"][0]["after"]["sm_clock_hz"] == 1.755e9
    assert not {"environment", "flags"} & set(detail["result"])
    page = served.client.get(f"/trials/{flagged[0]}").text
    for part in ("Its times are in doubt", "1 other process (977), 77.1 GiB", "1,755 MHz of 1,980 MHz"):
        assert part in page
    other = next(item["id"] for item in items if not item["flags"])
    assert "Its times are in doubt" not in served.client.get(f"/trials/{other}").text
    assert served.client.get(f"/v1/trials/{other}").json()["environment"] == []
    assert served.client.get(f"/sweeps/{sweep.sweep_id}").text.count("in doubt") == 2


def test_sweep_show_marks_them(
    sweep: Seeded, database_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["sweep", "show", sweep.sweep_id, "--database", database_url]) == 0
    said = capsys.readouterr().out
    assert "2 trials: their times are in doubt" in said
    assert said.count("busy_host, shared_card") == 2
    assert main(["sweep", "show", sweep.sweep_id, "--database", database_url, "--json"]) == 0
    items = json.loads(capsys.readouterr().out)["items"]
    assert sum(bool(item["flags"]) for item in items) == 2


def test_a_fit_warns_with_their_count_and_can_leave_them_out(
    sweep: Seeded, database: Database, database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with database.reading() as session:
        frame = SampleRepository(session).frame(sweep_id=sweep.sweep_id)
    rows = int(frame["trial_id"].isin(_flagged(database, sweep)).sum())
    assert 0 < rows < len(frame)
    where = [
        "--cluster",
        "hgx-h200",
        "--hardware-id",
        str(frame["hardware_id"].iloc[0]),
        "--database",
        database_url,
    ]
    assert main(["fit", *where]) == 0
    said = capsys.readouterr()
    assert f"Warning: {rows} of {len(frame)} rows are of flagged trials" in said.err.replace("\n", " ")
    assert main(["fit", *where, "--without-flagged", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["flagged_rows"], answer["rows"]) == (0, len(frame) - rows)


def test_a_plan_and_a_later_sweep_leave_them_out(sweep: Seeded, database: Database) -> None:
    cluster, adapter = preset("hgx-h200", 1), load_adapter("ring_dtp")
    with database.session() as session:
        session.execute(update(Sample).values(hardware_id=cluster.hardware_id))

    left_out = [0]

    def told() -> tuple[int, int]:
        """Points of the measured front, and observations that a later sweep begins with."""
        with database.reading() as session:
            found = measured_points(session, cluster)
            points, left_out[0] = found.points, found.flagged
        _, warm = _older(database, "swp_later", parse_sweep(spec()), adapter, cluster.hardware_id)
        return sum(len(found) for found in points.values()), len(warm)

    def flag_all(flags: list[dict[str, str]]) -> None:
        with database.session() as session:
            for trial in TrialRepository(session).of_sweep(sweep.sweep_id, state="succeeded"):
                trial.result_json = {**(trial.result_json or {}), "flags": flags}

    assert told() == (3, 6)
    flag_all([])
    assert told() == (5, 10)
    # a machine that is always shared: a sweep begins better there than nowhere, a plan does not rest on it
    flag_all([{"flag": "busy_host", "message": "shared"}])
    assert told() == (0, 10)
    assert left_out == [5]


def test_rows_of_another_version_are_left_out_of_a_fit_and_counted(
    sweep: Seeded, database: Database, database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fit = ["fit", "--cluster", "hgx-h200", "--hardware-id", HARDWARE, "--database", database_url]
    with database.session() as session:
        trial = TrialRepository(session).of_sweep(sweep.sweep_id, state="succeeded")[0]
        old = SampleRepository(session).of_trial(trial.id)
        for sample in old:
            sample.operator_version = 999
        count = len(old)
    assert main([*fit, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["outdated_rows"], answer["rows"]) == (count, 4 * count)
    assert main(fit) == 0
    assert f"{count} rows of other versions of their operators were left out" in capsys.readouterr().err
    with database.session() as session:
        session.execute(update(Sample).values(operator_version=999))
    assert main(fit) != 0
    assert "present versions" in capsys.readouterr().err.replace("\n", " ")
