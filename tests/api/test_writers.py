"""Two who change the same thing at once: the tag is compared in the transaction that changes, on both databases."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, event, update

from api.services import planning
from cost_model.cluster_file import cluster_to_mapping
from cost_model.presets import preset
from db.lifecycle import TrialState
from db.repositories import ClusterRepository, SampleRepository, SweepRepository, TrialRepository
from db.repositories.samples import NewSample
from db.tables import Trial
from tests.api.conftest import Served
from tests.api.seed import seed_sweep
from tests.api.test_plans_http import REQUEST
from tests.postgres import KINDS, fresh_url

ROUNDS = 6
WRITERS = 3


@pytest.fixture(params=KINDS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with fresh_url(request.param, tmp_path) as url:
        yield url


def body(nodes: int) -> dict[str, Any]:
    return {"name": "ours", "spec": cluster_to_mapping(preset("hgx-h200", nodes))}


@contextmanager
def waiting_writer(
    served: Served, table: str, method: str, address: str, **request: Any
) -> Iterator[Future[Any]]:
    """A request under way that asks for rows of ``table`` that the caller holds: the block starts when it has asked."""
    asked = threading.Event()
    caller = threading.get_ident()

    def listen(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        locks = "IMMEDIATE" in statement or (
            f"FROM {table}" in statement and "FOR NO KEY UPDATE" in statement
        )
        if locks and threading.get_ident() != caller:
            asked.set()

    event.listen(Engine, "before_cursor_execute", listen)
    try:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(served.client.request, method, address, **request)
            assert asked.wait(20), "the request has asked for no lock"
            yield answer
    finally:
        event.remove(Engine, "before_cursor_execute", listen)


def test_of_writers_who_saw_the_same_version_one_wins(served: Served) -> None:
    served.client.post("/v1/clusters", json=body(1))
    address = "/v1/clusters/ours"
    nodes = iter(range(2, 1000))
    with ThreadPoolExecutor(WRITERS) as pool:
        for _ in range(ROUNDS):
            seen = {"If-Match": served.client.get(address).headers["etag"]}
            together = threading.Barrier(WRITERS)

            def write(
                many: int, seen: dict[str, str] = seen, together: threading.Barrier = together
            ) -> httpx.Response:
                together.wait(20)
                return served.client.put(address, json=body(many), headers=seen)

            answers = list(pool.map(write, [next(nodes) for _ in range(WRITERS)]))
            assert sorted(answer.status_code for answer in answers) == [200, *[412] * (WRITERS - 1)]
            (won,) = [answer for answer in answers if answer.status_code == 200]
            assert served.client.get(address).json() == won.json()


def test_a_replacement_that_waited_sees_what_came_before_it(served: Served) -> None:
    made = served.client.post("/v1/clusters", json=body(1))
    address, seen = made.headers["location"], {"If-Match": made.headers["etag"]}
    with served.database.session() as session:
        clusters = ClusterRepository(session)
        row = clusters.find("ours", lock=True)
        assert row is not None
        with waiting_writer(served, "stored_cluster", "PUT", address, json=body(3), headers=seen) as answer:
            clusters.replace(row, "ours", body(2)["spec"])
            session.commit()
            assert answer.result(20).status_code == 412
    assert served.client.get(address).json()["spec"]["nodes"] == 2


def test_a_cancellation_that_waited_sees_the_sweep_as_it_is_then(served: Served) -> None:
    sweep_id = seed_sweep(served.database, finish=False).sweep_id
    address = f"/v1/sweeps/{sweep_id}"
    seen = {"If-Match": served.client.get(address).headers["etag"]}
    with served.database.session() as session:
        SweepRepository(session).pause(sweep_id, "three failures within a minute")
        with waiting_writer(served, "sweep", "POST", f"{address}/cancel", headers=seen) as answer:
            session.commit()
            assert answer.result(20).status_code == 412
    assert served.client.get(address).json()["state"] == "paused"


def test_a_cancellation_that_waited_sees_a_trial_that_has_moved_on(served: Served) -> None:
    sweep_id = seed_sweep(served.database, finish=False).sweep_id
    address = f"/v1/sweeps/{sweep_id}"
    with served.database.session() as session:
        claim = TrialRepository(session).claim("test/1/1", sweep_ids=[sweep_id])
        assert claim is not None
        TrialRepository(session).start(claim)
    seen = {"If-Match": served.client.get(address).headers["etag"]}
    with served.database.session() as session:
        TrialRepository(session).finish(claim, TrialState.SUCCEEDED, latency_s=1.0)
        with waiting_writer(served, "trial", "POST", f"{address}/cancel", headers=seen) as answer:
            session.commit()
            refused = answer.result(20)
    assert refused.status_code == 412
    now = served.client.get(address)
    assert (now.json()["state"], now.json()["trials"]["succeeded"]) == ("queued", 1)
    again = {"If-Match": now.headers["etag"]}
    assert served.client.post(f"{address}/cancel", headers=again).status_code == 200


def test_a_worker_stores_its_samples_while_a_cancellation_waits_for_its_trial(served: Served) -> None:
    sweep_id = seed_sweep(served.database, finish=False).sweep_id
    with served.database.session() as session:
        claim = TrialRepository(session).claim("test/1/1", sweep_ids=[sweep_id])
        assert claim is not None
        TrialRepository(session).start(claim)
    with served.database.session() as session:
        session.execute(update(Trial).where(Trial.id == claim.trial.id).values(latency_s=1.0))
        with waiting_writer(served, "trial", "POST", f"/v1/sweeps/{sweep_id}/cancel") as answer:
            SampleRepository(session).add(
                claim,
                [NewSample("forward", 0, 0, 1.0, 1, 1, "tracked")],
                operator="ring_dtp",
                provider="flatpeak",
                shape={},
                ranks=1,
                hardware_id="test",
                operator_version=1,
                commit="",
            )
            session.commit()
            assert answer.result(20).status_code == 200
    assert served.client.get(f"/v1/sweeps/{sweep_id}").json()["state"] == "cancelled"


def test_of_two_who_store_the_same_new_name_one_makes_it(served: Served) -> None:
    with ThreadPoolExecutor(2) as pool:
        together = threading.Barrier(2)

        def store(nodes: int) -> int:
            together.wait(20)
            return served.client.post("/v1/clusters", json=body(nodes)).status_code

        assert sorted(pool.map(store, [1, 2])) == [201, 409]


def test_of_two_who_store_the_same_under_one_name_both_have_it(served: Served) -> None:
    for number in range(ROUNDS):
        with ThreadPoolExecutor(2) as pool:
            together = threading.Barrier(2)

            def store(_: int, number: int = number, together: threading.Barrier = together) -> int:
                together.wait(20)
                named = {**body(1), "name": f"ours {number}"}
                return served.client.post("/v1/clusters", json=named).status_code

            assert sorted(pool.map(store, [1, 2])) == [200, 201]


def test_one_key_makes_one_plan_however_many_ask_at_once(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(2)
    plan = planning.compute_plan

    def both_have_planned(inputs: Any) -> Any:
        found = plan(inputs)
        together.wait(60)
        return found

    monkeypatch.setattr(planning, "compute_plan", both_have_planned)
    with ThreadPoolExecutor(2) as pool:

        def ask(_: int) -> tuple[int, str]:
            answer = served.client.post("/v1/plans", json=REQUEST, headers={"Idempotency-Key": "k"})
            return answer.status_code, answer.json()["id"]

        first, second = pool.map(ask, range(2))
    assert first == second
    assert first[0] == 201
    assert [one["id"] for one in served.client.get("/v1/plans").json()["items"]] == [first[1]]


def test_a_sweep_that_stays_the_same_keeps_its_tag(served: Served) -> None:
    sweep_id = seed_sweep(served.database).sweep_id
    tags = {served.client.get(f"/v1/sweeps/{sweep_id}").headers["etag"] for _ in range(3)}
    assert len(tags) == 1
