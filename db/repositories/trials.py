"""The life of a trial: claimed by one compare-and-set, every later write fenced by the claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from cost_model.errors import RuleError
from db.clock import database_now
from db.ids import new_id
from db.lifecycle import MAX_LOSSES, TERMINAL, SweepState, TrialState, sources
from db.repositories.events import EventRepository
from db.repositories.paging import Page, by_number
from db.tables import Attempt, Json, Sweep, Trial

_S = TrialState


class ClaimLost(Exception):
    """The claim no longer holds the trial (it was reaped, cancelled or finished): nothing was written."""


@dataclass(frozen=True, slots=True)
class NewTrial:
    """A point to be measured. ``rejected`` says why it will not be: its Eq. 6 bound exceeds the limit."""

    config: Json
    config_id: str
    proposed_by: str = "grid"
    bound_bytes: int | None = None
    bound_terms: Json | None = None
    rejected: str | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """A trial that this worker holds until its lease runs out."""

    claim_id: str
    trial: Trial
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Beat:
    """Answer to a heartbeat. When ``alive`` is false the claim is gone and the work must stop."""

    alive: bool
    cancel: bool


class TrialRepository:
    """Rows of ``trial`` and ``attempt``. Writers touch the trial's row first, then the attempt's."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._events = EventRepository(session)

    # -- what is asked ---------------------------------------------------------------------------------

    def add(self, sweep_id: str, trials: Sequence[NewTrial]) -> list[Trial]:
        """Queue the points that the sweep does not hold yet; rejected ones are stored as infeasible.

        The sweep's row is held until the transaction ends, so proposers take turns.
        """
        self._session.execute(select(Sweep.id).where(Sweep.id == sweep_id).with_for_update(key_share=True))
        held = set(self._session.scalars(select(Trial.config_id).where(Trial.sweep_id == sweep_id)))
        number = self._session.scalar(select(func.max(Trial.number)).where(Trial.sweep_id == sweep_id))
        number = -1 if number is None else number
        added = []
        for new in trials:
            if new.config_id in held:
                continue
            held.add(new.config_id)
            number += 1
            trial = Trial(
                id=new_id("trl"),
                sweep_id=sweep_id,
                number=number,
                config_json=new.config,
                config_id=new.config_id,
                proposed_by=new.proposed_by,
                bound_bytes=new.bound_bytes,
                bound_terms_json=new.bound_terms,
                state=_S.QUEUED.value,
            )
            self._session.add(trial)
            added.append((trial, new.rejected))
        self._session.flush()
        for trial, rejected in added:
            if rejected is not None:
                self.reject(trial.id, "bound", rejected)
        return [trial for trial, _ in added]

    def find(self, trial_id: str) -> Trial | None:
        return self._session.get(Trial, trial_id, populate_existing=True)

    def get(self, trial_id: str) -> Trial:
        """The trial.

        Raises:
            RuleError: there is none of this id.
        """
        trial = self.find(trial_id)
        if trial is None:
            raise RuleError(
                rule="a trial must exist",
                value=trial_id,
                remedy="List a sweep's trials with `flatpeak sweep show`.",
            )
        return trial

    def of_sweep(self, sweep_id: str, *, state: str | None = None) -> list[Trial]:
        """All trials of a sweep in the order they were proposed."""
        query = select(Trial).where(Trial.sweep_id == sweep_id).order_by(Trial.number)
        if state is not None:
            query = query.where(Trial.state == state)
        return list(self._session.scalars(query.execution_options(populate_existing=True)))

    def page(
        self, sweep_id: str, *, cursor: str | None = None, limit: int = 100, state: str | None = None
    ) -> Page[Trial]:
        """Trials of a sweep by number."""
        query = select(Trial).where(Trial.sweep_id == sweep_id)
        if state is not None:
            query = query.where(Trial.state == state)
        return by_number(self._session, query, Trial.number, cursor=cursor, limit=limit)

    def attempts(self, trial_id: str) -> list[Attempt]:
        """Every attempt at a trial, first to last."""
        query = select(Attempt).where(Attempt.trial_id == trial_id).order_by(Attempt.number)
        return list(self._session.scalars(query.execution_options(populate_existing=True)))

    def attempts_of_sweep(
        self, sweep_id: str, *, after: str | None = None, limit: int = 100
    ) -> list[tuple[Attempt, int]]:
        """Attempts at a sweep's trials with the trials' numbers, by id (which sorts by time of the claim)."""
        query = (
            select(Attempt, Trial.number)
            .join(Trial, Trial.id == Attempt.trial_id)
            .where(Attempt.sweep_id == sweep_id)
            .order_by(Attempt.id)
            .limit(limit)
        )
        if after is not None:
            query = query.where(Attempt.id > after)
        rows = self._session.execute(query.execution_options(populate_existing=True))
        return [(attempt, number) for attempt, number in rows]

    # -- the claim -------------------------------------------------------------------------------------

    def claim(
        self,
        worker: str,
        *,
        lease_s: float = 60.0,
        sweep_ids: Sequence[str] | None = None,
    ) -> Claim | None:
        """Take the oldest queued trial, or None. One compare-and-set decides between workers.

        Args:
            sweep_ids: those whose target the worker has matched with what it runs on; any by default.
        """
        query = (
            select(Trial.id)
            .join(Sweep, Sweep.id == Trial.sweep_id)
            .where(
                Trial.state == _S.QUEUED.value,
                Sweep.state.in_([SweepState.QUEUED.value, SweepState.RUNNING.value]),
            )
            .order_by(Trial.sweep_id, Trial.number)
            .limit(1)
            .with_for_update(of=Trial, skip_locked=True, key_share=True)
        )
        if sweep_ids is not None:
            query = query.where(Trial.sweep_id.in_(list(sweep_ids)))
        claim_id = new_id("clm")
        trial = self._session.scalar(
            update(Trial)
            .where(Trial.id == query.scalar_subquery(), Trial.state == _S.QUEUED.value)
            .values(
                state=_S.PLACING.value,
                claim_id=claim_id,
                started_at=func.coalesce(Trial.started_at, database_now()),
            )
            .returning(Trial)
            .execution_options(populate_existing=True, synchronize_session=False)
        )
        if trial is None:
            return None
        tried = self._session.scalar(select(func.count()).where(Attempt.trial_id == trial.id)) or 0
        attempt = Attempt(
            id=new_id("att"),
            trial_id=trial.id,
            sweep_id=trial.sweep_id,
            number=tried,
            claim_id=claim_id,
            worker=worker,
            lease_expires_at=self._now() + lease_s,
        )
        self._session.add(attempt)
        self._session.flush()
        self._tell(trial, _S.PLACING, attempt=attempt.id, worker=worker)
        return Claim(claim_id, trial, attempt)

    def start(
        self,
        claim: Claim,
        *,
        hardware_id: str | None = None,
        software: Json | None = None,
        lease_s: float | None = None,
    ) -> None:
        """placing → running, with what it runs on; its lease begins anew where ``lease_s`` is given.

        Raises:
            ClaimLost: the claim no longer holds the trial.
        """
        trial = self._fenced(claim.claim_id, _S.RUNNING, {})
        self._session.execute(
            update(Attempt)
            .where(Attempt.claim_id == claim.claim_id)
            .values(started_at=database_now(), hardware_id=hardware_id, software_json=software)
        )
        if lease_s is not None:
            self.heartbeat(claim.claim_id, lease_s=lease_s)
        self._tell(trial, _S.RUNNING, attempt=claim.attempt.id)

    def heartbeat(self, claim_id: str, *, lease_s: float = 60.0) -> Beat:
        """Extend the lease, unless the claim is gone; says whether the trial should stop."""
        row = self._session.execute(
            update(Attempt)
            .where(Attempt.claim_id == claim_id, Attempt.finished_at.is_(None))
            .values(lease_expires_at=database_now() + lease_s)
            .returning(Attempt.trial_id)
        ).scalar()
        if row is None:
            return Beat(alive=False, cancel=True)
        cancel = self._session.scalar(select(Trial.cancel_requested).where(Trial.id == row))
        return Beat(alive=True, cancel=bool(cancel))

    def progress(self, claim: Claim, payload: Json) -> None:
        """An event that says how far the trial is."""
        self._events.append(claim.trial.sweep_id, "trial.progress", trial_id=claim.trial.id, payload=payload)

    def finish(
        self,
        claim: Claim,
        state: TrialState,
        *,
        reason_kind: str | None = None,
        reason: str | None = None,
        result: Json | None = None,
        latency_s: float | None = None,
        peak_bytes: int | None = None,
        log_tail: str | None = None,
    ) -> None:
        """Store the answer and end the attempt.

        Raises:
            ClaimLost: the claim no longer holds the trial; a late report changes nothing.
        """
        if state not in TERMINAL:
            raise RuleError(
                rule="a trial is finished in a terminal state",
                value=state.value,
                remedy=f"Choose one of {sorted(s.value for s in TERMINAL)}.",
            )
        trial = self._fenced(
            claim.claim_id,
            state,
            {
                "reason_kind": reason_kind,
                "reason": reason,
                "result_json": result,
                "latency_s": latency_s,
                "peak_bytes": peak_bytes,
                "finished_at": database_now(),
                "claim_id": None,
            },
        )
        self._end_attempt(claim.claim_id, state, reason_kind, reason, log_tail)
        self._tell(
            trial, state, reason_kind=reason_kind, reason=reason, latency_s=latency_s, peak_bytes=peak_bytes
        )

    def reject(self, trial_id: str, reason_kind: str, reason: str) -> bool:
        """queued → infeasible, never launched. False when it was not queued any more."""
        return self._from_queue(trial_id, _S.INFEASIBLE, reason_kind, reason)

    def prune(self, trial_id: str, reason: str) -> bool:
        """queued → pruned: it can no longer matter. False when it was not queued any more."""
        return self._from_queue(trial_id, _S.PRUNED, "pruned", reason)

    def cancel(self, trial_id: str) -> bool:
        """Cancel a queued trial, or ask the worker of a live one to stop. False when it has ended."""
        if self._from_queue(trial_id, _S.CANCELLED, "cancelled", "cancelled by the user"):
            return True
        live = [_S.PLACING.value, _S.RUNNING.value]
        asked = self._session.scalar(
            update(Trial)
            .where(Trial.id == trial_id, Trial.state.in_(live))
            .values(cancel_requested=True)
            .returning(Trial.id)
        )
        return asked is not None

    # -- losses ----------------------------------------------------------------------------------------

    def reap(self, limit: int = 100) -> list[str]:
        """Take back the trials whose lease has run out; returns their ids."""
        expired = (
            select(Attempt.claim_id)
            .join(Trial, Trial.claim_id == Attempt.claim_id)
            .where(Attempt.finished_at.is_(None), Attempt.lease_expires_at < database_now())
            .order_by(Trial.id)
            .limit(limit)
            .with_for_update(of=Trial, skip_locked=True, key_share=True)
        )
        claims = list(self._session.scalars(expired))
        return [
            trial
            for claim in claims
            if (trial := self._lose(claim, "the worker's lease ran out")) is not None
        ]

    def live_attempts(self) -> list[Attempt]:
        """Attempts that hold a trial now, whoever works on them."""
        return list(self._session.scalars(select(Attempt).where(Attempt.finished_at.is_(None))))

    def abandon(
        self, claim_id: str, reason: str, *, reason_kind: str = "lost", log_tail: str | None = None
    ) -> bool:
        """Take a trial back before its lease runs out, because its worker or one of its ranks is dead.

        Counted as a loss. False when the claim no longer holds the trial.
        """
        return self._lose(claim_id, reason, kind=reason_kind, log_tail=log_tail) is not None

    def release(self, claim: Claim, reason: str) -> bool:
        """Give a trial back unharmed (the worker was told to stop): not counted as a loss."""
        return self._lose(claim.claim_id, reason, kind="released", counted=False) is not None

    # -- within ----------------------------------------------------------------------------------------

    def _lose(
        self,
        claim_id: str,
        reason: str,
        *,
        kind: str = "lost",
        counted: bool = True,
        log_tail: str | None = None,
    ) -> str | None:
        try:
            trial = self._fenced(
                claim_id, _S.LOST, {"losses": Trial.losses + (1 if counted else 0), "claim_id": None}
            )
        except ClaimLost:
            return None
        self._end_attempt(claim_id, _S.LOST, kind, reason, log_tail)
        self._tell(trial, _S.LOST, reason=reason)
        values: dict[str, Any]
        if trial.cancel_requested:
            target, values = _S.CANCELLED, {"reason_kind": "cancelled", "reason": reason}
        elif trial.losses > MAX_LOSSES:
            target = _S.FAILED
            values = {"reason_kind": kind, "reason": f"lost {trial.losses} times; the last time {reason}"}
        else:
            target, values = _S.QUEUED, {}
        if target in TERMINAL:
            values["finished_at"] = database_now()
        self._session.execute(
            update(Trial)
            .where(Trial.id == trial.id, Trial.state.in_([s.value for s in sources(target)]))
            .values(state=target.value, **values)
        )
        self._tell(trial, target, **({"reason": values["reason"]} if "reason" in values else {}))
        return trial.id

    def _fenced(self, claim_id: str, target: TrialState, values: dict[str, Any]) -> Trial:
        trial = self._session.scalar(
            update(Trial)
            .where(Trial.claim_id == claim_id, Trial.state.in_([s.value for s in sources(target)]))
            .values(state=target.value, **values)
            .returning(Trial)
            .execution_options(populate_existing=True, synchronize_session=False)
        )
        if trial is None:
            raise ClaimLost(claim_id)
        return trial

    def _from_queue(self, trial_id: str, target: TrialState, kind: str, reason: str) -> bool:
        trial = self._session.scalar(
            update(Trial)
            .where(Trial.id == trial_id, Trial.state == _S.QUEUED.value)
            .values(state=target.value, reason_kind=kind, reason=reason, finished_at=database_now())
            .returning(Trial)
            .execution_options(populate_existing=True, synchronize_session=False)
        )
        if trial is None:
            return False
        self._tell(trial, target, reason_kind=kind, reason=reason)
        return True

    def _end_attempt(
        self, claim_id: str, outcome: TrialState, kind: str | None, reason: str | None, log_tail: str | None
    ) -> None:
        self._session.execute(
            update(Attempt)
            .where(Attempt.claim_id == claim_id, Attempt.finished_at.is_(None))
            .values(
                finished_at=database_now(),
                outcome=outcome.value,
                reason_kind=kind,
                reason=reason,
                log_tail=log_tail,
            )
        )

    def _tell(self, trial: Trial, state: TrialState, **payload: Any) -> None:
        told = {"number": trial.number, **{k: v for k, v in payload.items() if v is not None}}
        self._events.append(trial.sweep_id, f"trial.{state.value}", trial_id=trial.id, payload=told)

    def _now(self) -> float:
        return float(self._session.scalar(select(database_now())) or 0.0)
