"""Tables of a sweep of any size: the same rows by page and as CSV, and never all of them in memory."""

from __future__ import annotations

import csv
import io
import tracemalloc
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import insert, inspect, select

from api.services.tables import samples_after, samples_csv, trials_csv
from db.repositories import SampleRepository, TrialRepository
from db.repositories.trials import NewTrial
from db.session import Database
from db.tables import Sample
from tests.api.conftest import Served
from tests.api.seed import seed_mixed, seed_sweep


def many_samples(database: Database, rows: int) -> str:
    """A seeded sweep with ``rows`` more samples of its first trial."""
    seeded = seed_sweep(database)
    with database.session() as session:
        row = session.scalars(select(Sample).where(Sample.trial_id == seeded.trial_ids[0])).first()
        names = [attribute.key for attribute in inspect(Sample).column_attrs if attribute.key != "id"]
        first: dict[str, Any] = {name: getattr(row, name) for name in names}
        for start in range(0, rows, 5000):
            more = [{**first, "repeat": 3 + n} for n in range(start, min(rows, start + 5000))]
            session.execute(insert(Sample), more)
    return seeded.sweep_id


def test_the_streamed_table_is_the_frame(database: Database) -> None:
    sweep_id = many_samples(database, 4500)  # more than one batch, and not a whole number of them
    with database.reading() as session:
        frame = SampleRepository(session).frame(sweep_id=sweep_id)
    assert len(frame) == 4500 + 5 * 24
    assert "".join(samples_csv(database, sweep_id)) == frame.to_csv(index=False, lineterminator="\n")


def test_a_large_table_is_never_whole_in_memory(database: Database) -> None:
    sweep_id = many_samples(database, 30_000)
    sent = 0
    tracemalloc.start()
    for piece in samples_csv(database, sweep_id):
        sent += len(piece)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sent > 9_000_000
    assert peak < sent / 2


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15, deadline=None)
@given(limit=st.integers(1, 130))
def test_pages_of_any_size_hold_every_sample_once(database: Database, limit: int) -> None:
    with database.reading() as session:
        known = SampleRepository(session).frame()
    sweep_id = str(known["sweep_id"].iloc[0]) if len(known) else seed_sweep(database).sweep_id
    seen, after, more = [], 0, True
    while more:
        with database.reading() as session:
            rows, more = samples_after(session, sweep_id, after, limit)
        assert len(rows) == limit or not more
        seen += [number for number, _ in rows]
        after = seen[-1]
    assert len(seen) == len(set(seen)) == 5 * 24
    assert seen == sorted(seen)


def test_a_page_is_read_on_while_rows_are_added(database: Database) -> None:
    sweep_id = many_samples(database, 10)
    with database.reading() as session:
        first, more = samples_after(session, sweep_id, 0, 100)
    assert more
    seed_sweep(database)  # another sweep's rows come between
    with database.reading() as session:
        rest, more = samples_after(session, sweep_id, first[-1][0], 100)
    assert not more
    assert len(first) + len(rest) == 10 + 5 * 24


def test_trials_with_different_knobs_share_one_table(database: Database) -> None:
    sweep_id = seed_sweep(database, finish=False).sweep_id
    with database.session() as session:
        extra = [NewTrial({"other_knob": number}, f"x{number}") for number in range(2500)]
        TrialRepository(session).add(sweep_id, extra)
    lines = "".join(trials_csv(database, sweep_id, set(), {})).splitlines()
    assert lines[0].startswith("number,id,state,other_knob,ring_mode,strip_rows,")
    assert len(lines) == 1 + 8 + 2500
    assert len("".join(trials_csv(database, sweep_id, set(), {"other_knob": "7"})).splitlines()) == 2


def test_the_slow_mode_stands_beside_the_latency(served: Served) -> None:
    sweep_id = seed_mixed(served.database)
    rows = list(csv.DictReader(io.StringIO("".join(trials_csv(served.database, sweep_id, set(), {})))))
    names = list(rows[0])
    assert names[names.index("latency_s") :][:3] == ["latency_s", "slow_s", "slow_share"]
    assert [(row["slow_s"], row["slow_share"]) for row in rows[:2]] == [("0.07", "0.4"), ("", "")]
    items = served.client.get(f"/v1/sweeps/{sweep_id}/trials").json()["items"]
    assert [(one["slow_s"], one["slow_share"]) for one in items[:2]] == [(0.07, 0.4), (None, None)]


def test_a_table_of_nothing_known_is_refused_before_it_starts(served: Served) -> None:
    for table in ("samples.csv", "trials.csv", "samples"):
        answer = served.client.get(f"/v1/sweeps/swp_none/{table}")
        assert answer.status_code == 404
        assert answer.headers["content-type"] == "application/problem+json"


def test_attempts_are_stretches_of_workers_time_page_by_page(served: Served) -> None:
    sweep_id = seed_sweep(served.database).sweep_id
    address, seen, cursor = f"/v1/sweeps/{sweep_id}/attempts?limit=4", [], ""
    while True:
        page = served.client.get(f"{address}&cursor={cursor}" if cursor else address).json()
        seen += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert [one["trial_number"] for one in seen] == [0, 1, 2, 4, 5, 6]
    assert [one["outcome"] for one in seen].count("failed") == 1
    for one in seen:
        assert one["claimed_at"] <= one["started_at"] <= one["finished_at"]
    assert served.client.get("/v1/sweeps/swp_none/attempts").status_code == 404
    assert served.client.get(f"{address}&cursor=%00").status_code == 400
