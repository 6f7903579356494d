"""Sweeps and trials as the API shows them, read through the repositories."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from api.errors import Conflict, NotFound, RuleError
from api.schemas.common import Page, decode_cursor, decode_number, encode_cursor, timestamp
from api.schemas.sweeps import Attempt, Sample, Sweep, Trial, TrialDetail
from db.clock import database_now
from db.lifecycle import SWEEP_TERMINAL, SweepState
from db.repositories import SampleRepository, SweepRepository, TrialRepository
from db.tables import Attempt as AttemptRow
from db.tables import Sample as SampleRow
from db.tables import Sweep as SweepRow
from db.tables import Trial as TrialRow
from tuner.registry import load_adapter, operator_names
from tuner.sweeping.sweep_spec import SweepSpec

_SCAN = 500
_LATELY_S = 60.0
_WORKERS = 64
SLOW_MODE = ("slow_s", "slow_share")
"""What a trial's result says of its slow mode, where its latencies had two."""


def sweep_view(row: SweepRow, counts: dict[str, int], *, worked_on: bool | None) -> Sweep:
    """One row as the API shows it."""
    return Sweep(
        id=row.id,
        name=row.name,
        operator=row.operator,
        provider=row.provider,
        strategy=row.strategy,
        ranks=row.ranks,
        device=row.device,
        hardware_id=row.hardware_id,
        state=row.state,
        reason=row.reason,
        worked_on=worked_on,
        max_trials=row.max_trials,
        trials=dict(sorted(counts.items())),
        memory_limit_bytes=row.spec_json.get("memory_limit_bytes"),
        spec=row.spec_json,
        created_at=timestamp(row.created_at),
        started_at=timestamp(row.started_at),
        finished_at=timestamp(row.finished_at),
    )


def _worked_on(session: Session, row: SweepRow) -> bool | None:
    """Whether somebody works on a running sweep: holds a trial of it, or held one within the last minute.

    A worker of this machine that has ended does not count, whatever its lease says; nor does this process, which asks.
    """
    if row.state != SweepState.RUNNING:
        return None
    from tuner.sweeping.worker import is_dead, worker_name

    attempts = session.scalars(
        select(AttemptRow)
        .where(AttemptRow.sweep_id == row.id)
        .order_by(AttemptRow.finished_at.is_not(None), AttemptRow.claimed_at.desc(), AttemptRow.id.desc())
        .limit(_WORKERS)
    )
    now = session.scalar(select(database_now())) or 0.0
    return any(
        (one.lease_expires_at if one.finished_at is None else one.finished_at + _LATELY_S) > now
        and one.worker != worker_name()
        and not is_dead(one.worker)
        for one in attempts
    )


def trial_view(row: TrialRow) -> Trial:
    """One row as the API shows it."""
    return Trial(**_trial_fields(row))


def _trial_fields(row: TrialRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "sweep_id": row.sweep_id,
        "number": row.number,
        "state": row.state,
        "config": row.config_json,
        "bound_bytes": row.bound_bytes,
        "bound_terms": row.bound_terms_json,
        "latency_s": row.latency_s,
        **{name: (row.result_json or {}).get(name) for name in SLOW_MODE},
        "peak_bytes": row.peak_bytes,
        "reason_kind": row.reason_kind,
        "reason": row.reason,
        "flags": (row.result_json or {}).get("flags", []),
        "proposed_by": row.proposed_by,
        "created_at": timestamp(row.created_at),
        "started_at": timestamp(row.started_at),
        "finished_at": timestamp(row.finished_at),
    }


def sample_view(row: SampleRow) -> Sample:
    """One row as the API shows it."""
    names = ("trial_id", "rank", "repeat", "seconds", "allocated_bytes", "reserved_bytes", "peak_source")
    return Sample.model_validate({"pass": row.pass_, **{name: getattr(row, name) for name in names}})


def _attempt_view(row: AttemptRow) -> Attempt:
    return Attempt(
        id=row.id,
        number=row.number,
        worker=row.worker,
        outcome=row.outcome,
        reason_kind=row.reason_kind,
        reason=row.reason,
        hardware_id=row.hardware_id,
        software=row.software_json,
        log_tail=row.log_tail,
        claimed_at=timestamp(row.claimed_at),
        started_at=timestamp(row.started_at),
        finished_at=timestamp(row.finished_at),
    )


def list_sweeps(
    session: Session, *, cursor: str | None, limit: int, operator: str | None, state: str | None
) -> Page[Sweep]:
    """A page of sweeps, newest first."""
    sweeps = SweepRepository(session)
    page = sweeps.page(cursor=decode_cursor(cursor), limit=limit, operator=operator, state=state)
    counts = sweeps.counts_of([row.id for row in page.items])
    return Page(
        items=[sweep_view(row, counts[row.id], worked_on=_worked_on(session, row)) for row in page.items],
        next_cursor=encode_cursor(page.next_cursor) if page.next_cursor else None,
    )


def get_sweep(session: Session, sweep_id: str) -> Sweep:
    """One sweep.

    Raises:
        NotFound: there is none.
    """
    sweeps = SweepRepository(session)
    row = sweeps.find(sweep_id)
    if row is None:
        raise NotFound("sweep", sweep_id)
    return sweep_view(row, sweeps.counts(sweep_id), worked_on=_worked_on(session, row))


def cancel_sweep(session: Session, sweep_id: str, allow: Callable[[Sweep], None] | None = None) -> Sweep:
    """Cancel a sweep that has not ended: its queued trials at once, its running ones as soon as they stop.

    Args:
        allow: is shown the sweep as it stays until it is cancelled, and raises if it must not be.

    Raises:
        NotFound: there is none.
        Conflict: it has ended.
    """
    sweeps = SweepRepository(session)
    if sweeps.find(sweep_id) is None:
        raise NotFound("sweep", sweep_id)
    sweeps.hold(sweep_id)
    before = get_sweep(session, sweep_id)
    if before.state in SWEEP_TERMINAL:
        raise Conflict(
            rule="only a sweep that has not ended can be cancelled",
            value=before.state,
            remedy="Nothing is left to do: it has ended.",
        )
    if allow is not None:
        allow(before)
    sweeps.cancel(sweep_id)
    return get_sweep(session, sweep_id)


def matching(trials: Iterable[TrialRow], states: set[str], knobs: dict[str, str]) -> Iterator[TrialRow]:
    """Trials in one of ``states`` (any, when empty) whose knobs have the given values, compared as text."""
    for row in trials:
        if states and row.state not in states:
            continue
        if all(knob_text(row.config_json.get(name)) == value for name, value in knobs.items()):
            yield row


def knob_text(value: object) -> str:
    """A knob's value as JSON writes it, so that filters read alike on the server and in the browser."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def check_knobs(session: Session, sweep_id: str, asked: Iterable[str]) -> None:
    """Refuse filters by knobs that the sweep's operator, its file and its trials do not know.

    Raises:
        NotFound: there is no such sweep.
        RuleError: an unknown knob.
    """
    row = SweepRepository(session).find(sweep_id)
    if row is None:
        raise NotFound("sweep", sweep_id)
    unknown = set(asked) - set(row.spec_json.get("space", {}))
    if not unknown:
        return
    trials = TrialRepository(session).of_sweep(sweep_id)
    known = {*row.spec_json.get("space", {}), *(name for trial in trials for name in trial.config_json)}
    if row.operator in operator_names():
        spec = SweepSpec.model_validate(row.spec_json)
        space = load_adapter(row.operator).space(spec.shape, spec.target.group_size, spec.provider)
        known |= {knob.name for knob in space.knobs}
    if unknown := unknown - known:
        raise RuleError(
            rule="a filter knob.NAME names a knob of the sweep",
            value=sorted(unknown)[0],
            remedy=f"Knobs there are: {', '.join(sorted(known)) or 'none'}.",
        )


def list_trials(
    session: Session,
    sweep_id: str,
    *,
    cursor: str | None,
    limit: int,
    states: set[str],
    knobs: dict[str, str],
) -> Page[Trial]:
    """A page of a sweep's trials by number.

    Raises:
        NotFound: there is no such sweep.
        RuleError: a filter names a knob that the sweep does not have.
    """
    check_knobs(session, sweep_id, knobs)
    position = decode_number(cursor)
    place = None if position is None else str(position)
    found: list[Trial] = []
    repository = TrialRepository(session)
    while True:
        page = repository.page(sweep_id, cursor=place, limit=_SCAN)
        for row in matching(page.items, states, knobs):
            if len(found) == limit:
                return Page(items=found, next_cursor=encode_cursor(found[-1].number))
            found.append(trial_view(row))
        if page.next_cursor is None:
            return Page(items=found, next_cursor=None)
        place = page.next_cursor


def get_trial(session: Session, trial_id: str) -> TrialDetail:
    """One trial with its attempts and samples.

    Raises:
        NotFound: there is none.
    """
    trials = TrialRepository(session)
    row = trials.find(trial_id)
    if row is None:
        raise NotFound("trial", trial_id)
    sweep = get_sweep(session, row.sweep_id)
    result = row.result_json or {}
    return TrialDetail(
        **_trial_fields(row),
        result={name: value for name, value in result.items() if name not in ("environment", "flags")}
        or None,
        environment=result.get("environment", []),
        memory_limit_bytes=sweep.memory_limit_bytes,
        attempts=[_attempt_view(attempt) for attempt in trials.attempts(trial_id)],
        samples=[sample_view(sample) for sample in SampleRepository(session).of_trial(trial_id)],
    )
