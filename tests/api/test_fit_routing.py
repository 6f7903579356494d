"""A fit and a parity chart read a router's profile as numbers: guests and uneven sends are in the formula."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from api.cli import main
from cost_model.cluster_file import cluster_to_mapping
from cost_model.presets import preset
from cost_model.rates import CostModel
from cost_model.rates_default import default_cost_model
from cost_model.sample_formulas import sample_seconds
from db.lifecycle import TrialState
from db.repositories import (
    CostModelRepository,
    NewTrial,
    SampleRepository,
    SweepRepository,
    TrialRepository,
)
from db.repositories.samples import NewSample
from db.session import Database
from tests.api.conftest import Served
from tuner.registry import load_adapter
from tuner.routing.rows import routing_values

RANKS = 4
CLUSTER = preset("hgx-h200", 1)
LAYER: dict[str, Any] = {"hidden": 2048, "intermediate": 4096, "experts": 16, "top_k": 2}
LAYER |= {"dtype": "bfloat16", "min_rows": 1}


def measured(database: Database, truth: CostModel, profiles: tuple[str, ...]) -> None:
    """A sweep for every profile and length, its samples as the formula has them."""
    for profile in profiles:
        for tokens in (1024, 4096):
            shape = {**LAYER, "tokens_per_rank": tokens, "profile": profile}
            _sweep(database, truth, shape)


def _sweep(database: Database, truth: CostModel, shape: dict[str, Any]) -> None:
    values = {**shape, **routing_values(shape, RANKS), "ranks": RANKS, "scalar_bytes": 2}
    with database.session() as session:
        sweep = SweepRepository(session).create(
            name="routed",
            operator="pipelined_llep",
            provider="flatpeak",
            strategy="grid",
            ranks=RANKS,
            device="cpu",
            spec={"shape": shape},
            max_trials=4,
        )
        configs = [{"chunks": chunks, "dispatch_schedule": "serial"} for chunks in (1, 2, 4, 8)]
        TrialRepository(session).add(sweep.id, [NewTrial(c, str(c)) for c in configs])
        while claim := TrialRepository(session).claim("test/1/1", sweep_ids=[sweep.id]):
            config = claim.trial.config_json
            TrialRepository(session).start(claim, hardware_id=truth.hardware_id, software={"torch": "test"})
            TrialRepository(session).finish(claim, TrialState.SUCCEEDED, latency_s=1.0, peak_bytes=1)
            SampleRepository(session).add(
                claim,
                [
                    NewSample(
                        name,
                        rank,
                        repeat,
                        sample_seconds(truth.view(), "pipelined_llep", values | config, name),
                        1,
                        None,
                        "cuda",
                    )
                    for name in ("forward", "backward")
                    for rank in range(RANKS)
                    for repeat in range(3)
                ],
                operator="pipelined_llep",
                provider="flatpeak",
                shape=shape,
                ranks=RANKS,
                hardware_id=truth.hardware_id,
                operator_version=load_adapter("pipelined_llep").version,
                commit="test",
            )


def test_a_fit_explains_what_guests_cost(
    database: Database, database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured(database, default_cost_model(CLUSTER), ("balanced", "skew:80/2", "one_hot", "rank_dependent"))
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(cluster_to_mapping(CLUSTER)))
    assert main(["fit", "--cluster", str(file), "--database", database_url, "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["report"]["operators"]
    # the rows are the prior's own: it predicts them exactly where it is told of the guests
    assert report["prior_error"] == pytest.approx(0.0, abs=1e-6)
    assert report["rows"] == 64


def test_parity_of_the_truth_is_a_line_for_every_profile(served: Served) -> None:
    truth = default_cost_model(CLUSTER)
    measured(served.database, truth, ("balanced", "skew:80/2", "random"))
    with served.database.session() as session:
        row = CostModelRepository(session).add(truth.hardware_id, truth.to_json(), report={}, promoted=True)
    points = served.client.get(f"/v1/cost-models/{row.id}/parity").json()["items"]
    assert len(points) == 3 * 2 * 4 * 2
    for point in points:
        assert math.log(point["predicted_s"] / point["measured_s"]) == pytest.approx(0.0, abs=1e-6)
    guests = {p["config"]["profile"]: p["config"]["migrated_experts"] for p in points}
    assert guests["skew:80/2"] > guests["balanced"] == 0
