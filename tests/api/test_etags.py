"""Tags of resources, and what If-Match and If-None-Match make of a request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.errors import BadRequest
from api.etags import read_tags
from cost_model.cluster_file import cluster_to_mapping
from cost_model.presets import preset
from cost_model.rates_default import default_cost_model
from db.repositories import ClusterRepository, CostModelRepository
from db.session import Database
from tests.api.conftest import Serve, Served
from tests.api.seed import HARDWARE, seed_cost_model, seed_sweep, work
from tests.api.test_plans_http import CONFIG, REQUEST

CLUSTER: dict[str, Any] = cluster_to_mapping(preset("hgx-h200", 1))
NONE_SUCH = '"00000000000000000000000000000000"'


def queued(served: Served) -> str:
    """Address of a sweep that nobody has begun."""
    return f"/v1/sweeps/{seed_sweep(served.database, finish=False).sweep_id}"


def tag(served: Served, address: str) -> str:
    found: str = served.client.get(address).headers["etag"]
    return found


@pytest.fixture
def addresses(served: Served) -> dict[str, str]:
    """One address of each kind of resource."""
    seeded = seed_sweep(served.database)
    cost_model_id = seed_cost_model(served.database, default_cost_model(preset("hgx-h200", 1)).to_json())
    model = served.client.post("/v1/models", json={"name": "mine", "hf_config": CONFIG})
    cluster = served.client.post("/v1/clusters", json={"name": "ours", "spec": CLUSTER})
    plan = served.client.post("/v1/plans", json=REQUEST)
    return {
        "sweep": f"/v1/sweeps/{seeded.sweep_id}",
        "trial": f"/v1/trials/{seeded.trial_ids[0]}",
        "cost model": f"/v1/cost-models/{cost_model_id}",
        "model": model.headers["location"],
        "cluster": cluster.headers["location"],
        "plan": plan.headers["location"],
        "export": f"{plan.headers['location']}/export",
        "document": "/v1/openapi.json",
    }


def test_every_resource_has_a_strong_tag_and_answers_304_to_it(
    served: Served, addresses: dict[str, str]
) -> None:
    for address in addresses.values():
        first = served.client.get(address)
        assert first.status_code == 200
        assert first.headers["etag"].startswith('"')
        again = served.client.get(address, headers={"If-None-Match": first.headers["etag"]})
        assert again.status_code == 304, address
        assert again.content == b""
        for kept in ("etag", "cache-control", "content-disposition"):
            assert again.headers.get(kept) == first.headers.get(kept)
        assert first.headers["cache-control"] == "private, no-cache"
        head = served.client.head(address)
        assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", first.headers["etag"])
        assert head.headers["content-length"] == str(len(first.content))
    assert len({tag(served, address) for address in addresses.values()}) == len(addresses)


def test_a_tag_changes_with_the_resource_and_only_then(served: Served) -> None:
    seeded = seed_sweep(served.database, finish=False)
    watched = [f"/v1/sweeps/{seeded.sweep_id}", f"/v1/trials/{seeded.trial_ids[0]}"]
    before = [tag(served, address) for address in watched]
    assert [tag(served, address) for address in watched] == before
    work(served.database, seeded.sweep_id, most=1)
    after = [tag(served, address) for address in watched]
    assert all(old != new for old, new in zip(before, after, strict=True))
    stale = served.client.get(watched[0], headers={"If-None-Match": before[0]})
    assert stale.status_code == 200
    assert stale.headers["etag"] == after[0]


def test_a_cost_model_no_longer_in_force_has_another_tag(served: Served) -> None:
    rates = default_cost_model(preset("hgx-h200", 1)).to_json()
    address = f"/v1/cost-models/{seed_cost_model(served.database, rates)}"
    before = tag(served, address)
    with served.database.session() as session:
        CostModelRepository(session).add(HARDWARE, rates, promoted=True)
    assert served.client.get(address).json()["promoted"] is False
    assert tag(served, address) != before


def test_what_was_made_comes_with_the_tag_that_get_gives(served: Served) -> None:
    for path, body in (
        ("/v1/models", {"name": "mine", "hf_config": CONFIG}),
        ("/v1/clusters", {"name": "ours", "spec": CLUSTER}),
        ("/v1/plans", REQUEST),
    ):
        made = served.client.post(path, json=body)
        assert made.headers["etag"] == tag(served, made.headers["location"])
        assert made.headers["cache-control"] == "no-store"
    cancelled = served.client.post(f"{queued(served)}/cancel")
    assert cancelled.headers["etag"] == tag(served, cancelled.headers["content-location"])


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ("{tag}", 304),
        ("W/{tag}", 304),
        ('"a", {tag}', 304),
        ('"a,b",,W/{tag} ,', 304),
        ("*", 304),
        (NONE_SUCH, 200),
        ('"a", W/"b"', 200),
        ("", 200),
        ("abc", 400),
        ("w/{tag}", 400),
        ("*, {tag}", 400),
        ('"a" "b"', 400),
        ('"open', 400),
    ],
)
def test_if_none_match_on_get(served: Served, sent: str, status: int) -> None:
    address = queued(served)
    answer = served.client.get(address, headers={"If-None-Match": sent.format(tag=tag(served, address))})
    assert answer.status_code == status
    if status == 400:
        assert "If-None-Match" in answer.json()["rule"]


def test_a_field_may_come_in_several_lines(served: Served) -> None:
    address = queued(served)
    lines = [("If-None-Match", '"a"'), ("If-None-Match", tag(served, address))]
    assert served.client.get(address, headers=lines).status_code == 304
    lines = [("If-Match", '"a"'), ("If-Match", '"b"')]
    refused = served.client.get(address, headers=lines)
    assert refused.status_code == 412
    assert refused.json()["value"] == '"a", "b"'


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (None, 200),
        ("{tag}", 200),
        ("*", 200),
        ('"a", {tag}', 200),
        ('"a",, {tag},', 200),
        (NONE_SUCH, 412),
        ("W/{tag}", 412),
        ('"a", W/{tag}', 412),
        ("", 412),
        ("abc", 400),
    ],
)
def test_if_match_on_cancel(served: Served, sent: str | None, status: int) -> None:
    address = queued(served)
    headers = {} if sent is None else {"If-Match": sent.format(tag=tag(served, address))}
    answer = served.client.post(f"{address}/cancel", headers=headers)
    assert answer.status_code == status
    state = served.client.get(address).json()["state"]
    assert state == ("cancelled" if status == 200 else "queued")


def test_a_refused_change_says_rule_value_and_remedy_and_changes_nothing(served: Served) -> None:
    address = queued(served)
    seen = tag(served, address)
    work(served.database, address.rsplit("/", 1)[1], most=1)
    before = served.client.get(address).content
    refused = served.client.post(f"{address}/cancel", headers={"If-Match": seen})
    assert refused.status_code == 412
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.headers["cache-control"] == "no-store"
    problem = refused.json()
    assert problem["type"] == "urn:flatpeak:problem:precondition-failed"
    assert problem["rule"] == "If-Match must hold the tag that the resource has now"
    assert problem["value"] == seen
    assert "GET it again" in problem["remedy"]
    assert served.client.get(address).content == before
    weak = served.client.post(f"{address}/cancel", headers={"If-Match": f"W/{tag(served, address)}"})
    assert "without W/" in weak.json()["remedy"]


def test_if_none_match_on_a_change_refuses_what_the_client_knows(served: Served) -> None:
    address = queued(served)
    for sent in ("*", tag(served, address), f"W/{tag(served, address)}"):
        assert served.client.post(f"{address}/cancel", headers={"If-None-Match": sent}).status_code == 412, (
            sent
        )
    assert served.client.post(f"{address}/cancel", headers={"If-None-Match": NONE_SUCH}).status_code == 200


def test_what_would_fail_anyway_fails_without_a_look_at_the_tags(served: Served) -> None:
    stale = {"If-Match": NONE_SUCH}
    ended = f"/v1/sweeps/{seed_sweep(served.database).sweep_id}/cancel"
    assert served.client.post(ended, headers=stale).status_code == 409
    assert served.client.post("/v1/sweeps/swp_none/cancel", headers=stale).status_code == 404
    body = {"name": "m", "hf_config": CONFIG}
    assert served.client.put("/v1/models/none", headers=stale, json=body).status_code == 404
    assert served.client.put("/v1/models/none", json=body).status_code == 404
    assert served.client.get("/v1/models/none", headers={"If-None-Match": "*"}).status_code == 404


def test_nobody_without_a_token_hears_that_a_tag_is_current(serve: Serve, database: Database) -> None:
    with serve(tokens_required=True) as served:
        address = queued(served)
        for sent in ({"If-None-Match": "*"}, {"If-Match": "*"}, {"If-Match": "abc"}):
            assert served.client.get(address, headers=sent).status_code == 401
            assert served.client.head(address, headers=sent).status_code == 401
            assert served.client.put("/v1/models/m", headers=sent, json={}).status_code == 401


def changed_cluster(nodes: int) -> dict[str, Any]:
    return cluster_to_mapping(preset("hgx-h200", nodes))


def test_what_a_user_wrote_is_replaced_only_by_who_has_seen_it(served: Served) -> None:
    made = served.client.post("/v1/clusters", json={"name": "ours", "spec": changed_cluster(1)})
    address, seen = made.headers["location"], made.headers["etag"]
    body = {"name": "ours", "spec": changed_cluster(2)}

    same = served.client.post("/v1/clusters", json={"name": "ours", "spec": changed_cluster(1)})
    assert (same.status_code, same.headers["etag"]) == (200, seen)
    assert same.headers["content-location"] == address
    other = served.client.post("/v1/clusters", json=body)
    assert other.status_code == 409
    assert f"PUT {address}" in other.json()["remedy"]

    blind = served.client.put(address, json=body)
    assert blind.status_code == 428
    assert blind.json()["type"] == "urn:flatpeak:problem:precondition-required"
    assert "If-Match: *" in blind.json()["remedy"]
    assert served.client.put(address, json=body, headers={"If-Match": NONE_SUCH}).status_code == 412
    assert tag(served, address) == seen

    done = served.client.put(address, json=body, headers={"If-Match": seen})
    assert done.status_code == 200
    assert "etag" not in done.headers  # RFC 9110, section 9.3.4: what is kept is not what was sent
    assert (done.json()["id"], done.json()["spec"]["nodes"]) == (made.json()["id"], 2)
    assert done.json() == served.client.get(address).json()
    assert served.client.put(address, json=body, headers={"If-Match": seen}).status_code == 412
    whatever = {"name": "ours", "spec": changed_cluster(4)}
    assert served.client.put(address, json=whatever, headers={"If-Match": "*"}).json()["spec"]["nodes"] == 4


def test_a_replaced_model_may_have_a_new_name_but_not_another_ones(served: Served) -> None:
    first = served.client.post("/v1/models", json={"name": "first", "hf_config": CONFIG})
    served.client.post("/v1/models", json={"name": "second", "hf_config": CONFIG})
    address, any_version = first.headers["location"], {"If-Match": "*"}
    taken = served.client.put(address, json={"name": "second", "hf_config": CONFIG}, headers=any_version)
    assert (taken.status_code, taken.json()["value"]) == (409, "second")
    body = {"name": "third", "hf_config": {**CONFIG, "num_local_experts": 64}}
    renamed = served.client.put(address, json=body, headers=any_version).json()
    assert (renamed["id"], renamed["name"], renamed["spec"]["name"]) == (first.json()["id"], "third", "third")
    assert served.client.get("/v1/models/third").json() == renamed
    assert served.client.get("/v1/models/first").status_code == 404
    wrong = served.client.put(address, json={"name": "third", "spec": {"experts": 0}}, headers=any_version)
    assert wrong.status_code == 422
    assert len(served.client.get("/v1/models").json()["items"]) == 2


def test_what_has_no_tag_is_not_kept_and_scripts_are_asked_for_anew(served: Served) -> None:
    for path in ("/", "/plan", "/v1/sweeps", "/v1/models", "/healthz", "/v1/sweeps/swp_none"):
        assert served.client.get(path).headers["cache-control"] == "no-store", path
    script = served.client.get("/static/js/api.js")
    assert script.headers["cache-control"] == "no-cache"
    again = served.client.get("/static/js/api.js", headers={"If-None-Match": script.headers["etag"]})
    assert again.status_code == 304


def test_the_methods_of_an_address_are_told(served: Served) -> None:
    refused = served.client.delete("/v1/models/mine")
    assert refused.status_code == 405
    assert refused.headers["allow"] == "GET, HEAD, PUT"
    assert served.client.delete("/v1/plans").headers["allow"] == "GET, POST"
    assert served.client.put("/login").headers["allow"] == "GET, POST"
    assert served.client.put("/static/js/api.js").headers["allow"] == "GET, HEAD"


def test_the_document_tells_of_tags(served: Served) -> None:
    paths = served.client.get("/v1/openapi.json").json()["paths"]
    for address, item in paths.items():
        for method, route in item.items():
            told = json.dumps(route.get("parameters", []))
            if "304" in route["responses"] or "412" in route["responses"]:
                assert "if-match" in told, (method, address)
            if method == "put":
                assert {"412", "428"} <= route["responses"].keys(), address


_TAGS = st.text(st.characters(codec="latin-1", exclude_characters='" \x7f', min_codepoint=0x21), max_size=8)
_LISTED = st.lists(st.tuples(st.booleans(), _TAGS))


@given(_LISTED, st.sampled_from([",", ", ", " ,\t", ",,"]))
def test_a_list_is_read_as_it_was_written(listed: list[tuple[bool, str]], comma: str) -> None:
    written = [f'{"W/" if weak else ""}"{text}"' for weak, text in listed]
    found = read_tags("If-Match", [comma.join(written)])
    assert found is not None
    assert found.tags == tuple(written)
    for weak, text in listed:
        assert found.matches_weakly(f'"{text}"')
        assert found.matches_strongly(f'"{text}"') == ((False, text) in listed)
        assert weak or not found.only_weak


@given(st.text(st.sampled_from('"W/*, \tab\x7f'), max_size=12))
def test_any_text_is_tags_or_refused(text: str) -> None:
    try:
        found = read_tags("If-Match", [text])
    except BadRequest:
        return
    assert found is not None
    rest = text
    for one in ["*"] if found.tags is None else found.tags:
        assert one in rest
        rest = rest.replace(one, "", 1)
    assert not rest.strip(", \t")


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text", ["," + " " * 60_000 + "x", '"a"' + " \t" * 30_000 + '"b"', "," * 60_000 + "x"]
)
def test_a_long_field_of_nothing_is_refused_at_once(text: str) -> None:
    """The server reads nothing else meanwhile: a time that grows as the square of the length would stop it."""
    with pytest.raises(BadRequest):
        read_tags("If-Match", [text])


def test_a_name_that_looks_like_an_id_is_refused(served: Served) -> None:
    made = served.client.post("/v1/clusters", json={"name": "ours", "spec": CLUSTER}).json()
    for method, address in (("POST", "/v1/clusters"), ("PUT", "/v1/clusters/ours")):
        answer = served.client.request(
            method, address, json={"name": made["id"], "spec": CLUSTER}, headers={"If-Match": "*"}
        )
        assert answer.status_code == 422
        assert "look like an id" in answer.text


def test_an_id_goes_before_a_name_that_is_the_same(database: Database) -> None:
    with database.session() as session:
        clusters = ClusterRepository(session)
        first = clusters.put("ours", CLUSTER)
        clusters.put(first.id, CLUSTER)
        clusters.replace(first, "ours again", CLUSTER)
        for lock in (False, True):
            found = clusters.find(first.id, lock=lock)
            assert found is not None
            assert found.name == "ours again"


def test_a_field_that_was_not_sent_asks_nothing() -> None:
    assert read_tags("If-Match", []) is None
