"""Whatever a client sends is answered by a rule: no figure, name, header or race breaks the server."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.api.conftest import Served
from tests.api.seed import seed_sweep, spec

NUMBERS = (
    "9" * 30,
    "1" + "0" * 400,
    "1e400",
    "-1",
    "NaN",
    "9223372036854775808",
    "1e18",
    "true",
    '"x"',
    "[]",
)
SWEEPS: dict[str, dict[str, Any]] = {
    "ring_dtp": {
        "shape": {"tokens_per_rank": 64, "hidden": 32, "vocab": 128},
        "space": {"ring_mode": ["weights"], "strip_rows": [32]},
    },
    "pipelined_llep": {
        "shape": {"tokens_per_rank": 64, "hidden": 32, "intermediate": 16, "experts": 8, "top_k": 2}
        | {"min_rows": 1},
        "space": {"chunks": [1, 2]},
    },
    "checkpoint_offload": {
        "shape": {"tokens_per_rank": 64, "hidden": 32, "boundaries": 4},
        "space": {"host_budget_bytes": [0]},
    },
    "stream_adamw": {
        "shape": {"params": 4096, "tensors": 4},
        "space": {"engine": ["stream"], "bucket_params": [512], "staging_slots": [2]},
    },
}
PLACES = [
    (operator, part, name)
    for operator, body in SWEEPS.items()
    for part in ("shape", "space")
    for name in body[part]
]


def send(served: Served, body: dict[str, Any], figure: str) -> int:
    """Post a sweep in which ``@`` stands for a figure that no JSON writer would write."""
    text = json.dumps(body).replace('"@"', figure)
    answer = served.client.post("/v1/sweeps", content=text, headers={"Content-Type": "application/json"})
    if answer.status_code >= 400:
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["remedy"]
    return answer.status_code


@pytest.mark.parametrize(("operator", "part", "name"), PLACES, ids=str)
def test_no_figure_of_a_sweep_breaks_the_server(served: Served, operator: str, part: str, name: str) -> None:
    for figure in NUMBERS:
        body = json.loads(json.dumps({"operator": operator, "target": {"ranks": 1}, **SWEEPS[operator]}))
        body[part][name] = "@" if part == "shape" else ["@"]
        assert send(served, body, figure) in (202, 400, 422), (name, figure)


@pytest.mark.parametrize(
    "place", ["ranks", "nodes", "loopback", "seed", "repeats", "max_trials", "memory_limit_bytes", "run_s"]
)
def test_no_figure_beside_the_shape_breaks_the_server(served: Served, place: str) -> None:
    for figure in NUMBERS:
        body: dict[str, Any] = {"operator": "ring_dtp", "target": {"ranks": 1}, **SWEEPS["ring_dtp"]}
        if place in ("ranks", "nodes", "loopback"):
            body["target"] = {**body["target"], place: "@"}
        elif place == "run_s":
            body["timers"] = {place: "@"}
        else:
            body[place] = "@"
        assert send(served, body, figure) in (202, 400, 422), figure


@pytest.mark.parametrize(
    "profile", ["skew:" + "9" * 5000 + "/4", "skew:²/4", "skew:50/٣", "skew:", "random:", "x" * 100_000]
)
def test_no_profile_breaks_the_server(served: Served, profile: str) -> None:
    body = {"operator": "pipelined_llep", "target": {"ranks": 1}, **SWEEPS["pipelined_llep"]}
    answer = served.client.post("/v1/sweeps", json={**body, "shape": {**body["shape"], "profile": profile}})
    assert answer.status_code == 422
    assert "profile" in answer.json()["rule"]


@pytest.mark.parametrize(
    ("shape", "ranks", "chunks"),
    [
        ({"tokens_per_rank": 2**40}, 4, [1]),
        ({"tokens_per_rank": 2**20, "profile": "random"}, 64, [1]),
        ({"tokens_per_rank": 2**20, "experts": 65_536}, 1, [2**20]),
    ],
    ids=["tokens", "drawn", "chunks"],
)
def test_routes_beyond_what_can_be_counted_are_refused_at_once(
    served: Served, shape: dict[str, Any], ranks: int, chunks: list[int]
) -> None:
    layer = {**SWEEPS["pipelined_llep"]["shape"], "experts": 64, **shape}
    body = {"operator": "pipelined_llep", "target": {"ranks": ranks}, "shape": layer}
    answer = served.client.post("/v1/sweeps", json={**body, "space": {"chunks": chunks}})
    assert answer.status_code == 422
    assert "entries" in answer.json()["rule"]


def test_a_space_is_measured_with_the_knobs_left_out(served: Served) -> None:
    body = {"operator": "stream_adamw", "target": {"ranks": 1}, "shape": {"params": 10**9}}
    space = {"bucket_params": list(range(1, 1001)), "host_share": [n / 100 for n in range(100)]}
    answer = served.client.post("/v1/sweeps", json={**body, "space": space})
    assert answer.status_code == 422
    assert "points" in answer.json()["rule"]


NESTED: dict[str, dict[str, Any]] = {
    "/v1/sweeps": {
        "operator": "@",
        "provider": "@",
        "target": {"ranks": "@"},
        "shape": {"tokens_per_rank": "@", "hidden": "@", "vocab": "@"},
        "space": {"ring_mode": "@", "strip_rows": ["@"]},
        "strategy": "@",
    },
    "/v1/plans": {
        "model": {"hf_config": {"architectures": "@", "hidden_size": "@"}},
        "cluster": {"spec": {"name": "@", "topology": "@", "host": {"link_bytes_per_s": "@"}}},
        "workload": {"context_tokens": "@"},
        "options": {"fixed": {"chunk_tokens": "@"}},
    },
    "/v1/models": {
        "name": "@",
        "hf_config": {"rope_scaling": "@", "layer_types": "@"},
        "spec": {"name": "@"},
    },
    "/v1/clusters": {"name": "@", "spec": {"tiers": "@", "gpu": {"name": "@"}, "notes": "@"}},
}


def leaves(body: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    if body == "@":
        return [path]
    inside = body.items() if isinstance(body, dict) else enumerate(body)
    return [leaf for key, value in inside for leaf in leaves(value, (*path, key))]


VALID: dict[str, dict[str, Any]] = {
    "/v1/sweeps": {"operator": "ring_dtp", "target": {"ranks": 1}, **SWEEPS["ring_dtp"]},
    "/v1/plans": {
        "model": {"example": "gpt-oss-20b"},
        "cluster": {"preset": "hgx-h200", "nodes": 1},
        "workload": {"context_tokens": 131072, "global_batch_tokens": 524288},
    },
    "/v1/models": {"name": "m"},
    "/v1/clusters": {"name": "c"},
}


@pytest.mark.parametrize(
    ("address", "path"),
    [(address, path) for address, body in NESTED.items() for path in leaves(body)],
    ids=str,
)
def test_nothing_nested_breaks_the_server(served: Served, address: str, path: tuple[str | int, ...]) -> None:
    for depth in (55, 900, 100_000):
        for open_, inner, close in (("[", "", "]"), ('{"a":', "1", "}"), ("[[1],", "2", "]")):
            body = json.loads(json.dumps(VALID[address]))
            if path[0] in ("model", "cluster") or path[:1] == ("spec",) or path[0] == "hf_config":
                body[path[0]] = {}
            place = body
            for key, after in itertools.pairwise(path):
                fresh: Any = [None] if isinstance(after, int) else {}
                if not isinstance(place, list) and type(place.get(key)) is not type(fresh):
                    place[key] = fresh
                place = place[key]
            place[path[-1]] = "@"
            text = json.dumps(body).replace('"@"', open_ * depth + inner + close * depth)
            answer = served.client.post(address, content=text, headers={"Content-Type": "application/json"})
            assert answer.status_code in ((400, 413) if depth > 64 else (201, 202, 400, 422)), (depth, open_)
            if answer.status_code >= 400:
                assert answer.headers["content-type"] == "application/problem+json"
                assert answer.json()["remedy"]


@pytest.mark.parametrize(
    ("address", "path"),
    [
        *(("/v1/sweeps", (name,)) for name in ("repeats", "max_trials", "seed", "memory_limit_bytes")),
        *(("/v1/sweeps", path) for path in (("target", "ranks"), ("target", "nodes"), ("timers", "run_s"))),
        *(("/v1/plans", ("workload", name)) for name in ("context_tokens", "imbalance")),
        *(("/v1/plans", path) for path in (("cluster", "nodes"), ("options", "fixed", "chunk_tokens"))),
    ],
    ids=str,
)
def test_true_is_no_number(served: Served, address: str, path: tuple[str, ...]) -> None:
    body = json.loads(json.dumps(VALID[address]))
    place = body
    for key in path[:-1]:
        place = place.setdefault(key, {})
    place[path[-1]] = True
    answer = served.client.post(address, json=body)
    assert answer.status_code == 422
    assert answer.json()["rule"] == f"/{'/'.join(path)}: must be a number, not true or false"


def test_brackets_inside_text_are_no_nesting(served: Served) -> None:
    odd = "[" * 100 + '\\"{' + "{[" * 100
    body = {"operator": "ring_dtp", "target": {"ranks": 1}, **SWEEPS["ring_dtp"], "name": odd[:200]}
    assert served.client.post("/v1/sweeps", json=body).status_code == 202


def test_text_without_an_end_is_read_in_one_pass(served: Served) -> None:
    body = '{"name": "' + '\\"' * 450_000
    answer = served.client.post("/v1/sweeps", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400


IDS = ("a%00b", "..%2f..%2fetc", "%ff%fe", "x" * 3000, "';drop table sweep;--", "%F0%9F%98%80", "swp_%0a")
ADDRESSES = (
    "/v1/sweeps/{}",
    "/v1/sweeps/{}/trials",
    "/v1/sweeps/{}/samples.csv",
    "/v1/sweeps/{}/attempts",
    "/v1/sweeps/{}/events",
    "/v1/trials/{}",
    "/v1/plans/{}/export",
    "/v1/cost-models/{}/parity",
    "/v1/models/{}",
    "/sweeps/{}",
    "/plans/{}",
    "/cost-models?id={}",
    "/v1/sweeps?cursor={}",
    "/?operator={}",
)


@pytest.mark.parametrize("address", ADDRESSES)
def test_no_id_breaks_the_server(served: Served, address: str) -> None:
    for odd in IDS:
        assert served.client.get(address.format(odd)).status_code in (200, 400, 404, 422), odd


@pytest.mark.parametrize("address", [*ADDRESSES, "/static/{}", "/v1/none/{}"])
def test_no_address_with_a_nul_reaches_a_database(served: Served, address: str) -> None:
    refused = served.client.get(address.format("a%00b"))
    assert refused.status_code == 400
    assert "NUL" in refused.json()["rule"]


def test_no_event_id_breaks_a_stream(served: Served) -> None:
    address = f"/v1/sweeps/{seed_sweep(served.database).sweep_id}/events"
    for text in ("x", "-1", "9" * 18, "9" * 19, "9" * 30, "1.5", "²", "٣", "0"):
        answer = served.client.get(address, headers=[(b"Last-Event-ID", text.encode())])
        assert answer.status_code == (200 if text in ("0", "9" * 18) else 422 if len(text) > 20 else 400), (
            text
        )


def test_keys_of_any_kind_bind_one_body(served: Served) -> None:
    for key in ("a b", "é", "\x7f", "x" * 200):
        head = [(b"Content-Type", b"application/json"), (b"Idempotency-Key", key.encode())]
        bodies = [spec(), spec(), spec(repeats=5)]
        answers = [served.client.post("/v1/sweeps", content=json.dumps(b), headers=head) for b in bodies]
        assert [answer.status_code for answer in answers] == [202, 202, 422]
        assert answers[0].json()["id"] == answers[1].json()["id"]


def test_requests_at_one_moment_make_one_sweep_a_key_and_end_it_once(served: Served) -> None:
    def post(number: int) -> str:
        made = served.client.post("/v1/sweeps", json=spec(), headers={"Idempotency-Key": f"key {number % 3}"})
        assert made.status_code == 202
        return str(made.json()["id"])

    with ThreadPoolExecutor(12) as pool:
        made = list(pool.map(post, range(24)))
    assert len(set(made)) == 3
    assert {made[n] for n in range(0, 24, 3)} == {made[0]}
    with ThreadPoolExecutor(8) as pool:
        cancel = itertools.repeat(f"/v1/sweeps/{made[0]}/cancel", 8)
        ended = sorted(answer.status_code for answer in pool.map(served.client.post, cancel))
    assert ended == [200] + 7 * [409]
