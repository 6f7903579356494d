"""/v1/sweeps and /v1/trials over a real server."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from api.errors import BadRequest
from api.schemas.common import decode_cursor, encode_cursor
from tests.api.conftest import Serve, Served
from tests.api.seed import REPEATS, seed_sweep, spec, work
from tuner.sweeping.sweep_spec import read_sweep_file


def test_a_sweep_is_queued_not_run(served: Served) -> None:
    answer = served.client.post("/v1/sweeps", json=spec())
    assert answer.status_code == 202
    sweep = answer.json()
    assert answer.headers["location"] == f"/v1/sweeps/{sweep['id']}"
    again = served.client.get(answer.headers["location"]).json()
    assert again["state"] == "queued"
    assert again["trials"]["queued"] > 0
    assert again["operator"] == "ring_dtp"


FILES = sorted((Path(__file__).parents[2] / "examples" / "sweeps").rglob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: "/".join(file.parts[-2:]))
def test_what_a_file_may_say_may_be_posted(served: Served, file: Path) -> None:
    made = served.client.post("/v1/sweeps", json=yaml.safe_load(file.read_text()))
    assert made.status_code == 202, made.text
    stored, asked = made.json()["spec"], read_sweep_file(file).model_dump(mode="json")
    assert {**stored, "shape": None} == {**asked, "shape": None}
    assert asked["shape"].items() <= stored["shape"].items()


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"target": {"ranks": 4, "nodes": 2}}, ("target", "nodes")),
        ({"target": {"ranks": 1, "loopback": 8}}, ("target", "loopback")),
        ({"prune": True}, ("prune",)),
        ({"timers": {"run_s": 12.5}}, ("timers", "run_s")),
        ({"max_trials": 7, "strategy": "random"}, ("max_trials",)),
        ({"space": {"ring_mode": "weights", "strip_rows": 256}}, ("space", "strip_rows")),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else "",
)
def test_every_key_of_a_file_reaches_the_sweep(
    served: Served, change: dict[str, Any], place: tuple[str, ...]
) -> None:
    made = served.client.post("/v1/sweeps", json=spec(**change))
    assert made.status_code == 202, made.text
    stored, asked = made.json()["spec"], change
    for key in place:
        stored, asked = stored[key], asked[key]
    assert stored in (asked, [asked])


def test_only_operators_that_ship_are_run_for_a_request(served: Served) -> None:
    answer = served.client.post("/v1/sweeps", json=spec(operator="os:system"))
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == "/operator"


def test_a_rule_of_several_fields_is_told_in_our_words(served: Served) -> None:
    answer = served.client.post("/v1/sweeps", json=spec(target={"ranks": 4, "nodes": 3})).json()
    assert answer["rule"] == "/target: 4 ranks do not divide over 3 nodes"
    answer = served.client.post("/v1/sweeps", json=spec(repeats="many")).json()
    assert answer["rule"] == "/repeats: must be a whole number"


def test_the_same_key_and_body_give_the_same_sweep(served: Served) -> None:
    headers = {"Idempotency-Key": "one"}
    first = served.client.post("/v1/sweeps", json=spec(), headers=headers).json()["id"]
    assert served.client.post("/v1/sweeps", json=spec(), headers=headers).json()["id"] == first
    assert served.client.post("/v1/sweeps", json=spec()).json()["id"] != first
    other = served.client.post("/v1/sweeps", json=spec(repeats=5), headers=headers)
    assert other.status_code == 422
    assert other.json()["value"] == "one"
    assert len(served.client.get("/v1/sweeps").json()["items"]) == 2


def test_a_refused_sweep_leaves_nothing(served: Served) -> None:
    answer = served.client.post("/v1/sweeps", json=spec(space={"no_such_knob": [1]}))
    assert answer.status_code == 422
    assert served.client.get("/v1/sweeps").json()["items"] == []


def test_an_endless_space_is_refused_before_it_is_walked(served: Served) -> None:
    endless = {"ring_mode": ["weights"], "strip_rows": list(range(1, 1001))}
    answer = served.client.post("/v1/sweeps", json=spec(space=endless, max_trials=10))
    assert answer.status_code == 422
    assert "points" in answer.json()["rule"]


def pages(served: Served, path: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    cursor = ""
    while True:
        joint = "&" if "?" in path else "?"
        page = served.client.get(f"{path}{joint}cursor={cursor}" if cursor else path).json()
        items += page["items"]
        if page["next_cursor"] is None:
            return items
        cursor = page["next_cursor"]


def test_cursors_visit_every_row_once(served: Served) -> None:
    made = [seed_sweep(served.database, finish=False, name=f"s{i}").sweep_id for i in range(5)]
    assert [item["id"] for item in pages(served, "/v1/sweeps?limit=2")] == made[::-1]
    numbers = [item["number"] for item in pages(served, f"/v1/sweeps/{made[0]}/trials?limit=3")]
    assert numbers == list(range(8))


def test_trials_filter_by_state_and_knob(served: Served) -> None:
    sweep_id = seed_sweep(served.database).sweep_id
    address = f"/v1/sweeps/{sweep_id}/trials"
    both = pages(served, f"{address}?state=infeasible&state=failed&limit=1")
    assert [trial["number"] for trial in both] == [3, 6, 7]
    weights = pages(served, f"{address}?knob.ring_mode=weights&knob.strip_rows=512")
    assert [trial["config"] for trial in weights] == [{"ring_mode": "weights", "strip_rows": 512}]
    assert pages(served, f"{address}?knob.strip_rows=1") == []


def test_a_trial_holds_its_bound_attempts_and_samples(served: Served) -> None:
    seeded = seed_sweep(served.database)
    trial = served.client.get(f"/v1/trials/{seeded.trial_ids[0]}").json()
    assert sum(trial["bound_terms"].values()) == trial["bound_bytes"]
    assert len(trial["samples"]) == 2 * 4 * REPEATS
    assert trial["attempts"][0]["log_tail"] == "repeat 3 of 3"
    assert trial["memory_limit_bytes"] == spec()["memory_limit_bytes"]


def test_csv_and_json_hold_the_same_samples(served: Served) -> None:
    sweep_id = seed_sweep(served.database).sweep_id
    rows = list(csv.DictReader(io.StringIO(served.client.get(f"/v1/sweeps/{sweep_id}/samples.csv").text)))
    items = pages(served, f"/v1/sweeps/{sweep_id}/samples?limit=50")
    assert [(row["trial_id"], row["pass"], float(row["seconds"])) for row in rows] == [
        (item["trial_id"], item["pass"], item["seconds"]) for item in items
    ]
    trials = list(csv.DictReader(io.StringIO(served.client.get(f"/v1/sweeps/{sweep_id}/trials.csv").text)))
    assert [trial["state"] for trial in trials].count("succeeded") == 5


def test_cancelling_twice_is_a_conflict(served: Served) -> None:
    sweep_id = seed_sweep(served.database, finish=False).sweep_id
    cancelled = served.client.post(f"/v1/sweeps/{sweep_id}/cancel")
    assert cancelled.status_code == 200
    assert cancelled.json()["state"] == "cancelled"
    assert served.client.post(f"/v1/sweeps/{sweep_id}/cancel").status_code == 409


def frames(text: str) -> list[dict[str, str]]:
    """Server-sent events of a finished stream."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "id" in fields:
            found.append(fields)
    return found


def test_events_come_in_order_and_continue_behind_the_last_seen(served: Served) -> None:
    sweep_id = seed_sweep(served.database).sweep_id
    address = f"/v1/sweeps/{sweep_id}/events"
    everything = frames(served.client.get(address).text)
    ids = [int(frame["id"]) for frame in everything]
    assert ids[:-1] == sorted(set(ids[:-1]))
    assert everything[-1]["event"] == "end"
    kinds = [json.loads(frame["data"])["kind"] for frame in everything[:-1]]
    assert kinds[0] == "sweep.queued"
    assert kinds[-1] == "sweep.succeeded"
    middle = ids[len(ids) // 2]
    rest = frames(served.client.get(address, headers={"Last-Event-ID": str(middle)}).text)
    assert rest[:-1] == [frame for frame in everything[:-1] if int(frame["id"]) > middle]
    assert served.client.get(address, headers={"Last-Event-ID": "x"}).status_code == 400


def test_a_stream_shows_what_happens_while_it_is_open(served: Served) -> None:
    sweep_id = seed_sweep(served.database, finish=False).sweep_id
    kinds = []
    with served.client.stream("GET", f"/v1/sweeps/{sweep_id}/events") as stream:
        started = False
        for line in stream.iter_lines():
            if line.startswith("event: end"):
                break
            if line.startswith('data: {"kind"'):
                kinds.append(json.loads(line[6:])["kind"])
            if "sweep.queued" in line and not started:
                started = True
                work(served.database, sweep_id)
    assert kinds.count("trial.succeeded") == 5
    assert kinds[-1] == "sweep.succeeded"


def test_streams_are_limited(serve: Serve) -> None:
    with serve(max_streams=1) as served:
        sweep_id = seed_sweep(served.database, finish=False).sweep_id
        address = f"/v1/sweeps/{sweep_id}/events"
        with served.client.stream("GET", address) as first:
            lines = first.iter_lines()  # kept: a dropped iterator closes the stream
            next(lines)
            assert served.client.get(address).status_code == 503
            served.client.post(f"/v1/sweeps/{sweep_id}/cancel")


@given(st.from_regex(r"[a-z]{2,4}_[0-9a-z]{1,26}", fullmatch=True) | st.integers(0, 10**15).map(str))
def test_a_cursor_comes_back_as_it_went(key: str) -> None:
    assert decode_cursor(encode_cursor(key)) == key


@given(st.text(min_size=1, max_size=60))
def test_any_text_is_a_cursor_or_refused(text: str) -> None:
    try:
        key = decode_cursor(text)
    except BadRequest:
        return
    assert key is not None
    assert key.isascii()


def test_an_empty_cursor_starts_at_the_beginning() -> None:
    assert decode_cursor(None) is None
    assert decode_cursor("") is None
    with pytest.raises(BadRequest):
        decode_cursor("=")


def test_a_filter_by_an_unknown_knob_is_refused(served: Served) -> None:
    done = seed_sweep(served.database).sweep_id
    empty = served.client.post("/v1/sweeps", json=spec(strategy="tpe", space={})).json()["id"]
    for sweep_id in (done, empty):
        for table in ("trials", "trials.csv"):
            refused = served.client.get(f"/v1/sweeps/{sweep_id}/{table}?knob.bogus=4")
            assert refused.status_code == 422
            assert refused.json()["value"] == "bogus"
            assert "strip_rows" in refused.json()["remedy"]
            assert served.client.get(f"/v1/sweeps/{sweep_id}/{table}?knob.strip_rows=4").status_code == 200
