"""Sweeps: created, paused, resumed, cancelled, settled."""

from __future__ import annotations

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from cost_model.errors import RuleError
from db.clock import database_now
from db.ids import new_id
from db.lifecycle import LIVE, SWEEP_TERMINAL, TERMINAL, SweepState, TrialState
from db.repositories.events import EventRepository
from db.repositories.paging import Page, newest_first
from db.tables import Json, Sweep, Trial

_S = SweepState
_OOM = ("device_oom", "host_oom")


class SweepRepository:
    """Rows of ``sweep``. Writers lock the sweep's row first, then its trials."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._events = EventRepository(session)

    def create(
        self,
        *,
        name: str,
        operator: str,
        provider: str,
        strategy: str,
        ranks: int,
        device: str,
        spec: Json,
        max_trials: int,
        hardware_id: str | None = None,
    ) -> Sweep:
        """Add a queued sweep."""
        sweep = Sweep(
            id=new_id("swp"),
            name=name,
            operator=operator,
            provider=provider,
            strategy=strategy,
            ranks=ranks,
            device=device,
            hardware_id=hardware_id,
            spec_json=spec,
            max_trials=max_trials,
            state=_S.QUEUED.value,
        )
        self._session.add(sweep)
        self._session.flush()
        self._events.append(sweep.id, "sweep.queued")
        return sweep

    def find(self, sweep_id: str) -> Sweep | None:
        return self._session.get(Sweep, sweep_id, populate_existing=True)

    def get(self, sweep_id: str, *, lock: bool = False) -> Sweep:
        """The sweep; with ``lock``, its row is held until the transaction ends.

        Raises:
            RuleError: there is none of this id.
        """
        query = select(Sweep).where(Sweep.id == sweep_id).execution_options(populate_existing=True)
        sweep = self._session.scalar(query.with_for_update(key_share=True) if lock else query)
        if sweep is None:
            raise RuleError(
                rule="a sweep must exist",
                value=sweep_id,
                remedy="List the sweeps with `flatpeak sweep list`.",
            )
        return sweep

    def page(
        self,
        *,
        cursor: str | None = None,
        limit: int = 50,
        operator: str | None = None,
        state: str | None = None,
    ) -> Page[Sweep]:
        """Sweeps, newest first."""
        query = select(Sweep)
        if operator is not None:
            query = query.where(Sweep.operator == operator)
        if state is not None:
            query = query.where(Sweep.state == state)
        return newest_first(self._session, query, Sweep.id, cursor=cursor, limit=limit)

    def active(self) -> list[Sweep]:
        """Sweeps that may have work, oldest first."""
        states = (_S.QUEUED.value, _S.RUNNING.value)
        return list(self._session.scalars(select(Sweep).where(Sweep.state.in_(states)).order_by(Sweep.id)))

    def counts(self, sweep_id: str) -> dict[str, int]:
        """How many trials stand in each state; states with none are left out."""
        rows = self._session.execute(
            select(Trial.state, func.count().label("trials"))
            .where(Trial.sweep_id == sweep_id)
            .group_by(Trial.state)
        )
        return {row.state: row.trials for row in rows}

    def counts_of(self, sweep_ids: list[str]) -> dict[str, dict[str, int]]:
        """:meth:`counts` of several sweeps in one query."""
        found: dict[str, dict[str, int]] = {sweep_id: {} for sweep_id in sweep_ids}
        rows = self._session.execute(
            select(Trial.sweep_id, Trial.state, func.count())
            .where(Trial.sweep_id.in_(sweep_ids))
            .group_by(Trial.sweep_id, Trial.state)
        )
        for sweep_id, state, count in rows:
            found[sweep_id][state] = count
        return found

    def mark_running(self, sweep_id: str) -> None:
        """The first claim starts the sweep; later ones change nothing."""
        changed = self._session.execute(
            update(Sweep)
            .where(Sweep.id == sweep_id, Sweep.state == _S.QUEUED.value)
            .values(state=_S.RUNNING.value, started_at=func.coalesce(Sweep.started_at, database_now()))
            .returning(Sweep.id)
        ).scalar()
        if changed is not None:
            self._events.append(sweep_id, "sweep.running")

    def pause(self, sweep_id: str, reason: str) -> bool:
        """Stop handing out trials; those that run go on. False when the sweep was not active."""
        return self._move(sweep_id, (_S.QUEUED, _S.RUNNING), _S.PAUSED, reason)

    def resume(self, sweep_id: str) -> bool:
        """Hand out trials again. False when the sweep was not paused."""
        sweep = self.get(sweep_id, lock=True)
        if sweep.state != _S.PAUSED.value:
            return False
        self._session.execute(update(Sweep).where(Sweep.id == sweep_id).values(resumed_at=database_now()))
        return self._move(sweep_id, (_S.PAUSED,), _S.RUNNING, None)

    def hold(self, sweep_id: str) -> list[Trial]:
        """Keep the sweep and its trials as they are until the transaction ends; returns the unfinished ones.

        Those that have ended do not change, and a new one needs the sweep's row.
        """
        self.get(sweep_id, lock=True)
        unfinished = select(Trial).where(
            Trial.sweep_id == sweep_id, Trial.state.not_in([s.value for s in TERMINAL])
        )
        unfinished = unfinished.order_by(Trial.id).execution_options(populate_existing=True)
        return list(self._session.scalars(unfinished.with_for_update(key_share=True)))

    def cancel(self, sweep_id: str, reason: str = "cancelled by the user") -> bool:
        """Cancel the queued trials and ask the running ones to stop. False when it had already ended."""
        unfinished = self.hold(sweep_id)
        if not self._move(sweep_id, (_S.QUEUED, _S.RUNNING, _S.PAUSED), _S.CANCELLED, reason):
            return False
        for trial in unfinished:
            trial.cancel_requested = True
            if trial.state == TrialState.QUEUED.value:
                trial.state, trial.reason_kind, trial.reason = TrialState.CANCELLED.value, "cancelled", reason
                trial.finished_at = self._session.scalar(select(database_now()))
                self._events.append(sweep_id, "trial.cancelled", trial_id=trial.id)
        self._session.flush()
        return True

    def settle(self, sweep_id: str, *, complete: bool) -> SweepState:
        """End the sweep when nothing is left to do.

        Args:
            complete: no further trial will be proposed.

        Returns:
            The state after it.
        """
        sweep = self.get(sweep_id, lock=True)
        state = SweepState(sweep.state)
        if not complete or state not in (_S.QUEUED, _S.RUNNING):
            return state
        counts = self.counts(sweep_id)
        if any(TrialState(s) not in TERMINAL for s in counts):
            return state
        if (
            counts.keys() == {TrialState.INFEASIBLE.value}
            and (why := self._least_bound(sweep_id)) is not None
        ):
            self._move(
                sweep_id, (state,), _S.SUCCEEDED, f"no point could be launched; of the smallest, {why}"
            )
            return _S.SUCCEEDED
        answered = counts.get("succeeded", 0) + counts.get("infeasible", 0) + counts.get("pruned", 0)
        target = _S.SUCCEEDED if answered else _S.FAILED
        self._move(sweep_id, (state,), target, None if answered else "no trial gave an answer")
        return target

    def recent_failures(self, sweep_id: str, window_s: float) -> list[str]:
        """Reasons of the trials that failed, not by lack of memory, in the last ``window_s`` seconds.

        Those from before the last resume are forgotten.
        """
        rows = self._session.execute(
            select(Trial.reason_kind, Trial.reason)
            .join(Sweep, Sweep.id == Trial.sweep_id)
            .where(
                Trial.sweep_id == sweep_id,
                Trial.state == TrialState.FAILED.value,
                Trial.finished_at > database_now() - window_s,
                Trial.finished_at > func.coalesce(Sweep.resumed_at, 0.0),
            )
            .order_by(Trial.finished_at)
        )
        return [reason or kind or "" for kind, reason in rows if kind not in _OOM]

    def live_trials(self, sweep_id: str) -> int:
        """How many trials somebody holds at this moment."""
        states = [s.value for s in LIVE]
        return (
            self._session.scalar(
                select(func.count())
                .select_from(Trial)
                .where(Trial.sweep_id == sweep_id, Trial.state.in_(states))
            )
            or 0
        )

    def _least_bound(self, sweep_id: str) -> str | None:
        """Why the point with the smallest bound was not launched; None when one was."""
        ruled_out = Trial.reason_kind == "bound"
        of_sweep = select(Trial.reason).where(Trial.sweep_id == sweep_id)
        if self._session.scalar(select(of_sweep.where(Trial.reason_kind != "bound").exists())):
            return None
        return self._session.scalar(of_sweep.where(ruled_out).order_by(Trial.bound_bytes).limit(1))

    def _move(
        self, sweep_id: str, sources: tuple[SweepState, ...], target: SweepState, reason: str | None
    ) -> bool:
        values: dict[str, object] = {"state": target.value, "reason": reason}
        if target in SWEEP_TERMINAL:
            values["finished_at"] = database_now()
        changed = self._session.execute(
            update(Sweep)
            .where(Sweep.id == sweep_id, Sweep.state.in_([s.value for s in sources]))
            .values(**values)
            .returning(Sweep.id)
        ).scalar()
        if changed is None:
            return False
        self._events.append(sweep_id, f"sweep.{target.value}", payload={"reason": reason} if reason else {})
        return True
