"""Events: append-only, read by ascending id."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db.session import queue_event
from db.tables import Event, Json


class EventRepository:
    """What happened to sweeps and trials."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def append(
        self, sweep_id: str, kind: str, *, trial_id: str | None = None, payload: Json | None = None
    ) -> None:
        """Record an event; it gets its id when the transaction commits."""
        queue_event(
            self._session, Event(sweep_id=sweep_id, trial_id=trial_id, kind=kind, payload_json=payload or {})
        )

    def after(self, last_id: int = 0, *, sweep_id: str | None = None, limit: int = 500) -> list[Event]:
        """Events with an id above ``last_id`` (the client's Last-Event-ID), oldest first."""
        query = select(Event).where(Event.id > last_id).order_by(Event.id).limit(limit)
        if sweep_id is not None:
            query = query.where(Event.sweep_id == sweep_id)
        return list(self._session.scalars(query))

    def last_id(self, sweep_id: str | None = None) -> int:
        """Id of the newest event, 0 when there is none."""
        query = select(func.max(Event.id))
        if sweep_id is not None:
            query = query.where(Event.sweep_id == sweep_id)
        return self._session.scalar(query) or 0
