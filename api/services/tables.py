"""Samples and trials of a sweep, page by page and as CSV: never more of a sweep in memory than a page."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from sqlalchemy.orm import Session

from api.schemas.attempts import AttemptSpan
from api.schemas.common import Page, decode_cursor, encode_cursor, timestamp
from api.schemas.sweeps import Sample
from api.services.sweeps import SLOW_MODE, check_knobs, get_sweep, knob_text, matching
from db.repositories import SampleRepository, TrialRepository
from db.repositories.samples import COLUMNS, SampleRow
from db.session import Database
from db.tables import Trial

_BATCH = 1000
_SHOWN = tuple(
    (name, COLUMNS.index(name))
    for name in (
        "trial_id",
        "pass",
        "rank",
        "repeat",
        "seconds",
        "allocated_bytes",
        "reserved_bytes",
        "peak_source",
    )
)


def samples_after(
    session: Session, sweep_id: str, after: int, limit: int
) -> tuple[list[tuple[int, Sample]], bool]:
    """Samples with an id above ``after``, each with its id, and whether more follow."""
    rows = SampleRepository(session).page(sweep_id, after=after, limit=limit + 1)
    found = [
        (int(row[0]), Sample.model_validate({name: row[at] for name, at in _SHOWN})) for row in rows[:limit]
    ]
    return found, len(rows) > limit


def attempts_page(session: Session, sweep_id: str, *, cursor: str | None, limit: int) -> Page[AttemptSpan]:
    """Attempts at a sweep's trials in the order of their claims.

    Raises:
        NotFound: there is no such sweep.
    """
    get_sweep(session, sweep_id)
    rows = TrialRepository(session).attempts_of_sweep(sweep_id, after=decode_cursor(cursor), limit=limit + 1)
    items = [
        AttemptSpan(
            id=row.id,
            trial_id=row.trial_id,
            trial_number=number,
            worker=row.worker,
            claimed_at=timestamp(row.claimed_at),
            started_at=timestamp(row.started_at),
            finished_at=timestamp(row.finished_at),
            outcome=row.outcome,
        )
        for row, number in rows[:limit]
    ]
    return Page(items=items, next_cursor=encode_cursor(items[-1].id) if len(rows) > limit else None)


def samples_csv(database: Database, sweep_id: str) -> Iterator[str]:
    """All samples of a sweep's successful trials as CSV, in pieces; the columns are the database's.

    Raises:
        NotFound: there is no such sweep (before the first piece).
    """
    with database.reading() as session:
        get_sweep(session, sweep_id)

    def rows() -> Iterator[SampleRow]:
        after = 0
        while True:
            with database.reading() as session:
                batch = SampleRepository(session).page(sweep_id, after=after, limit=_BATCH)
            yield from batch
            if len(batch) < _BATCH:
                return
            after = int(batch[-1][0])

    return _csv(COLUMNS, rows())


def trials_csv(database: Database, sweep_id: str, states: set[str], knobs: dict[str, str]) -> Iterator[str]:
    """A sweep's trials as CSV, in pieces, one column a knob.

    Raises:
        NotFound: there is no such sweep (before the first piece).
        RuleError: a filter names a knob that the sweep does not have.
    """
    with database.reading() as session:
        check_knobs(session, sweep_id, knobs)
    names = sorted(
        {name for row in matching(_trials(database, sweep_id), states, knobs) for name in row.config_json}
    )
    answers = ("peak_bytes", "bound_bytes", "reason_kind", "reason")

    def line(row: Trial) -> list[Any]:
        config = [knob_text(row.config_json[name]) if name in row.config_json else "" for name in names]
        slow = [(row.result_json or {}).get(name) for name in SLOW_MODE]
        rest = [getattr(row, name) for name in answers]
        return [row.number, row.id, row.state, *config, row.latency_s, *slow, *rest]

    kept = matching(_trials(database, sweep_id), states, knobs)
    return _csv(("number", "id", "state", *names, "latency_s", *SLOW_MODE, *answers), map(line, kept))


def _trials(database: Database, sweep_id: str) -> Iterator[Trial]:
    place: str | None = None
    while True:
        with database.reading() as session:
            page = TrialRepository(session).page(sweep_id, cursor=place, limit=_BATCH)
        yield from page.items
        if page.next_cursor is None:
            return
        place = page.next_cursor


def _csv(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """Lines in pieces of some kilobytes; what is not there is an empty cell."""
    text = io.StringIO()
    write: Callable[[Iterable[Any]], Any] = csv.writer(text, lineterminator="\n").writerow
    write(head)
    for row in rows:
        write(row)
        if text.tell() >= 1 << 16:
            yield text.getvalue()
            text.seek(0)
            text.truncate()
    yield text.getvalue()
