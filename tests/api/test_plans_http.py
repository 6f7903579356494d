"""/v1/plans, /v1/models, /v1/clusters, /v1/cost-models over a real server."""

from __future__ import annotations

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cost_model.cluster_file import cluster_to_mapping
from cost_model.presets import PRESET_NAMES, preset
from cost_model.rates_default import default_cost_model
from tests.api.conftest import Serve, Served
from tests.api.seed import HARDWARE, seed_cost_model, seed_sweep

MODELS = Path(__file__).parents[2] / "examples" / "models"
CONFIG: dict[str, Any] = json.loads((MODELS / "gpt-oss-20b.json").read_text())
REQUEST: dict[str, Any] = {
    "model": {"hf_config": CONFIG, "name": "gpt-oss-20b"},
    "cluster": {"preset": "hgx-h200", "nodes": 1},
    "workload": {"context_tokens": 131_072, "global_batch_tokens": 524_288},
}


def changed(path: str, value: object) -> dict[str, Any]:
    """The request with one value replaced; the path is dotted."""
    request = copy.deepcopy(REQUEST)
    *inner, last = path.split(".")
    place = request
    for key in inner:
        place = place[key]
    place[last] = value
    return request


def test_a_plan_is_made_stored_and_exported(served: Served) -> None:
    answer = served.client.post("/v1/plans", json=REQUEST, headers={"Idempotency-Key": "k"})
    assert answer.status_code == 201
    plan = answer.json()
    assert answer.headers["location"] == f"/v1/plans/{plan['id']}"
    assert plan["verdict"] == "fits"
    assert {"terms", "bound_bytes", "expected_bytes", "phase_bytes", "hbm_bytes"} <= plan["memory"].keys()
    assert {"terms", "total_s", "interval_s"} <= plan["step_time"].keys()
    assert served.client.get(answer.headers["location"]).json() == plan
    export = served.client.get(f"/v1/plans/{plan['id']}/export?format=launch")
    assert export.json()["launch"] == plan["launch"]
    assert export.json()["plan_id"] == plan["id"]
    assert served.client.get(f"/v1/plans/{plan['id']}/export?format=fortran").status_code == 422
    again = served.client.post("/v1/plans", json=REQUEST, headers={"Idempotency-Key": "k"})
    assert again.json() == plan
    other = served.client.post(
        "/v1/plans", json=changed("workload.imbalance", 2.0), headers={"Idempotency-Key": "k"}
    )
    assert other.status_code == 422
    listed = served.client.get("/v1/plans").json()["items"]
    assert [item["id"] for item in listed] == [plan["id"]]
    assert listed[0]["model"] == "gpt-oss-20b"
    assert served.client.get(f"/plans/{plan['id']}").status_code == 200


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("workload.context_tokens", 0, "context_tokens"),
        ("workload.global_batch_tokens", 131_073, "global_batch_tokens"),
        ("workload.context_tokens", 2**41, "context_tokens"),
        ("cluster.nodes", 0, "nodes"),
        ("cluster.preset", "hgx-none", "preset"),
        ("model.hf_config", {"model_type": "mystery"}, "config"),
        ("model.id", "mdl_1", "exactly one"),
        ("options", {"mode": "hope"}, "mode"),
        ("options", {"cost_model_id": "cm_none"}, "cost model"),
        ("workload.colour", "red", "colour"),
    ],
)
def test_a_wrong_request_is_named_and_leaves_nothing(
    served: Served, path: str, value: object, named: str
) -> None:
    answer = served.client.post("/v1/plans", json=changed(path, value))
    assert answer.status_code in (404, 422)
    problem = answer.json()
    assert named in json.dumps(problem)
    assert problem["remedy"]
    assert served.client.get("/v1/plans").json()["items"] == []


def test_planning_has_a_queue_with_an_end(serve: Serve) -> None:
    with serve(max_planning=1) as one, ThreadPoolExecutor(4) as pool:
        requests = [changed("workload.imbalance", 1.0 + i / 10) for i in range(4)]
        answers = list(pool.map(lambda body: one.client.post("/v1/plans", json=body), requests))
        assert {answer.status_code for answer in answers} <= {201, 503}
        assert any(answer.status_code == 201 for answer in answers)
        assert one.client.post("/v1/plans", json=REQUEST).status_code == 201


def test_stored_models_and_clusters_stand_for_full_ones(served: Served) -> None:
    model = served.client.post("/v1/models", json={"name": "mine", "hf_config": CONFIG})
    assert model.status_code == 201
    again = served.client.post("/v1/models", json={"name": "mine", "hf_config": CONFIG})
    assert again.json()["id"] == model.json()["id"]
    cluster = served.client.post(
        "/v1/clusters", json={"name": "ours", "spec": cluster_to_mapping(preset("hgx-h200", 1))}
    )
    assert cluster.status_code == 201
    assert served.client.get(cluster.headers["location"]).json()["name"] == "ours"
    plan = served.client.post(
        "/v1/plans",
        json={
            **REQUEST,
            "model": {"id": model.json()["id"]},
            "cluster": {"id": cluster.json()["id"], "nodes": 1},
        },
    ).json()
    assert plan["model"]["name"] == "mine"
    assert plan["cluster"]["name"] == "ours"
    assert served.client.get("/v1/models").json()["items"][0]["spec"]["experts"] == 32


def test_a_spec_with_an_unknown_or_absurd_field_is_refused(served: Served) -> None:
    stored = served.client.post("/v1/models", json={"name": "mine", "hf_config": CONFIG}).json()["spec"]
    for wrong in ({**stored, "wings": 2}, {**stored, "hidden": -1}, {**stored, "layers": "many"}):
        assert served.client.post("/v1/models", json={"name": "x", "spec": wrong}).status_code == 422
    assert len(served.client.get("/v1/models").json()["items"]) == 1


def test_presets_are_listed_beside_stored_clusters(served: Served) -> None:
    presets = served.client.get("/v1/clusters").json()["presets"]
    assert [item["preset"] for item in presets] == list(PRESET_NAMES)


def test_readiness_states_what_it_covers(served: Served) -> None:
    before = served.client.get("/readyz").json()
    assert before["ready"] is True
    assert before["presets"] == list(PRESET_NAMES)
    assert before["cost_models"]["fitted"] == []
    seed_cost_model(served.database, default_cost_model(preset("hgx-h200", 1)).to_json())
    assert served.client.get("/readyz").json()["cost_models"]["fitted"] == [HARDWARE]


def test_a_cost_model_shows_its_rates_and_parity(served: Served) -> None:
    seed_sweep(served.database)
    model = {**default_cost_model(preset("hgx-h200", 1)).to_json(), "hardware_id": HARDWARE}
    stored = seed_cost_model(served.database, model)
    detail = served.client.get(f"/v1/cost-models/{stored}").json()
    assert detail["promoted"] is True
    assert detail["model"]["rates"]
    points = served.client.get(f"/v1/cost-models/{stored}/parity").json()["items"]
    assert len(points) == 2 * 5
    assert all(point["low_s"] <= point["predicted_s"] <= point["high_s"] for point in points)


def test_metrics_count_sweeps_and_requests(served: Served) -> None:
    seed_sweep(served.database, finish=False)
    served.client.get("/v1/sweeps")
    text = served.client.get("/metrics").text
    assert 'flatpeak_sweeps{state="queued"} 1.0' in text
    assert 'flatpeak_requests_total{method="GET",route="/v1/sweeps",status="200"} 1.0' in text


_TEXTS = {"nul": "a\x00b", "half a pair": "\ud800", "other half": "a\udfff"}


@pytest.mark.parametrize("text", _TEXTS.values(), ids=_TEXTS.keys())
@pytest.mark.parametrize(
    ("address", "path"),
    [
        ("/v1/plans", ("model", "name")),
        ("/v1/plans", ("model", "example")),
        ("/v1/plans", ("model", "hf_config", "model_type")),
        ("/v1/plans", ("cluster", "preset")),
        ("/v1/sweeps", ("name",)),
        ("/v1/sweeps", ("shape", "dtype")),
        ("/v1/models", ("name",)),
    ],
)
def test_text_that_no_database_can_hold_is_refused_wherever_it_stands(
    served: Served, address: str, path: tuple[str, ...], text: str
) -> None:
    body: dict[str, Any] = copy.deepcopy(REQUEST) if address == "/v1/plans" else {"hf_config": CONFIG}
    if address == "/v1/sweeps":
        body = {"operator": "ring_dtp", "target": {"ranks": 1}, "shape": {}, "space": {"strip_rows": [16]}}
    place = body
    for key in path[:-1]:
        place = place.setdefault(key, {})
    place[path[-1]] = text
    answer = served.client.post(
        address, content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert "U+" in answer.json()["rule"]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1.5", "-1", '"16"'])
def test_a_knob_that_counts_takes_finite_whole_numbers(served: Served, value: str) -> None:
    shape = '{"tokens_per_rank": 64, "hidden": 32, "vocab": 128, "dtype": "float32"}'
    space = f'{{"strip_rows": [{value}]}}'
    body = f'{{"operator": "ring_dtp", "target": {{"ranks": 1}}, "shape": {shape}, "space": {space}}}'
    answer = served.client.post("/v1/sweeps", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert "strip_rows" in answer.json()["rule"]


@pytest.mark.parametrize("body", ["[" * 100_000, '{"workload": ' + "9" * 5000 + "}", b'{"a": "\xff"}'])
def test_json_that_cannot_be_read_is_told_so(served: Served, body: str | bytes) -> None:
    answer = served.client.post("/v1/plans", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["rule"].startswith("the body must be")
