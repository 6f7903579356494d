"""Which sweep a file means when it is to be gone on with, and whether an executor can run it at all."""

from __future__ import annotations

from api.errors import Conflict, NotFound
from cost_model.errors import RuleError
from db.lifecycle import SweepState
from db.repositories import SweepRepository
from db.session import Database
from db.tables import Sweep
from tuner.executors.base import Executor
from tuner.sweeping.misfit import misfit
from tuner.sweeping.sweep_spec import SweepSpec

_MOST = 500
_UNFINISHED = (SweepState.QUEUED, SweepState.RUNNING, SweepState.PAUSED)


def check_place(executor: Executor, spec: SweepSpec) -> None:
    """Refuse what this executor can never run, before anything is stored of it.

    Raises:
        RuleError: no room for the gang, no such device, or other hardware than the sweep is bound to.
    """
    if (found := misfit(executor, spec.target)) is not None:
        remedy = f"{found.remedy} With --enqueue it waits for them."
        raise RuleError(rule=found.rule, value=found.value, remedy=remedy)


def unfinished_of(database: Database, spec: SweepSpec) -> Sweep | None:
    """The newest sweep of this spec that has not ended."""
    return next((row for row in _of(database, spec) if row.state in _UNFINISHED), None)


def to_resume(database: Database, spec: SweepSpec) -> Sweep | None:
    """The sweep that --resume means: the newest unfinished one, else the newest if it succeeded; None if none was made.

    Raises:
        Conflict: all have ended, the newest without success.
    """
    made = _of(database, spec)
    found = next((row for row in made if row.state in _UNFINISHED), None) or next(iter(made), None)
    if found is not None and found.state not in (*_UNFINISHED, SweepState.SUCCEEDED):
        raise _ended(found, "Run the file without --resume: that makes a new one.")
    return found


def by_id(database: Database, sweep_id: str) -> Sweep:
    """A sweep that can be gone on with, or that has succeeded.

    Raises:
        NotFound: there is none of this id.
        Conflict: it was cancelled, or it failed.
    """
    with database.reading() as session:
        found = SweepRepository(session).find(sweep_id)
    if found is None:
        raise NotFound("sweep", sweep_id)
    if found.state not in (*_UNFINISHED, SweepState.SUCCEEDED):
        raise _ended(found, "Run its file: that makes a new one.")
    return found


def _ended(sweep: Sweep, remedy: str) -> Conflict:
    return Conflict(
        rule="only a sweep that has not ended can be resumed",
        value=f"{sweep.id} ({sweep.state})",
        remedy=remedy,
    )


def _of(database: Database, spec: SweepSpec) -> list[Sweep]:
    """Sweeps of the same spec, newest first; the stored shape also holds its defaults."""
    asked = spec.model_dump(mode="json", exclude={"shape"})
    operator = spec.operator if ":" not in spec.operator else None
    found = []
    with database.reading() as session:
        for row in SweepRepository(session).page(limit=_MOST, operator=operator).items:
            stored = dict(row.spec_json)
            shape = stored.pop("shape")
            if stored == asked and all(shape.get(key) == value for key, value in spec.shape.items()):
                found.append(row)
    return found
