"""Every refusal is a problem document with rule, value and remedy."""

from __future__ import annotations

import pytest

from tests.api.conftest import Serve, Served


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/nothing", None, 404),
        ("GET", "/v1/sweeps/swp_none", None, 404),
        ("GET", "/v1/trials/trl_none", None, 404),
        ("GET", "/v1/plans/pln_none", None, 404),
        ("GET", "/v1/cost-models/cm_none", None, 404),
        ("DELETE", "/v1/sweeps", None, 405),
        ("GET", "/v1/sweeps?limit=0", None, 422),
        ("GET", "/v1/sweeps?limit=501", None, 422),
        ("GET", "/v1/sweeps?state=asleep", None, 422),
        ("GET", "/v1/sweeps?cursor=%25%25", None, 400),
        ("POST", "/v1/sweeps", {"operator": "ring_dtp"}, 422),
        ("POST", "/v1/clusters", {"name": "x", "spec": {"nodes": 0}}, 422),
    ],
)
def test_a_refusal_names_rule_value_and_remedy(
    served: Served, method: str, path: str, body: object, status: int
) -> None:
    answer = served.client.request(method, path, json=body)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["status"] == status
    assert problem["rule"]
    assert problem["remedy"]
    assert "value" in problem
    assert problem["instance"] == path.split("?", maxsplit=1)[0]


def test_malformed_json_says_where(served: Served) -> None:
    answer = served.client.post(
        "/v1/sweeps", content=b'{"operator": ', headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400
    assert "character 13" in answer.json()["value"]


def test_each_broken_field_has_its_pointer(served: Served) -> None:
    body = {"operator": "ring_dtp", "target": {"ranks": 0}, "shape": {}, "space": {"a": [1]}, "repeats": 1}
    errors = served.client.post("/v1/sweeps", json=body).json()["errors"]
    assert {"/target/ranks", "/repeats"} <= {error["pointer"] for error in errors}


def test_a_body_over_the_limit_is_refused_unread(serve: Serve) -> None:
    with serve(max_body_bytes=1000) as small:
        declared = small.client.post("/v1/sweeps", json={"name": "x" * 2000})
        assert declared.status_code == 413
        chunked = small.client.post(
            "/v1/sweeps", content=iter([b"x" * 600, b"x" * 600]), headers={"Content-Type": "application/json"}
        )
        assert chunked.status_code == 413


def test_only_json_is_read(served: Served) -> None:
    answer = served.client.post("/v1/sweeps", content=b"a=1", headers={"Content-Type": "text/plain"})
    assert answer.status_code == 415


def test_a_foreign_host_name_is_refused_without_tokens(served: Served) -> None:
    answer = served.client.get("/v1/sweeps", headers={"Host": "evil.example"})
    assert answer.status_code == 400
    assert answer.json()["value"] == "evil.example"


def test_every_answer_carries_the_content_security_policy(served: Served) -> None:
    for path in ("/", "/plan", "/v1/sweeps", "/v1/nothing", "/static/flatpeak.css"):
        policy = served.client.get(path).headers["content-security-policy"]
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
