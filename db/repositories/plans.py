"""Plans as they were answered."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from db.ids import new_id
from db.repositories.paging import Page, newest_first
from db.tables import Json, Plan


class PlanRepository:
    """Rows of ``plan``."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, plan: Json, *, verdict: str, cost_model_id: str | None) -> Plan:
        """Store a plan's full JSON."""
        row = Plan(id=new_id("pln"), plan_json=plan, verdict=verdict, cost_model_id=cost_model_id)
        self._session.add(row)
        self._session.flush()
        self._session.refresh(row)
        return row

    def find(self, plan_id: str) -> Plan | None:
        return self._session.get(Plan, plan_id)

    def page(self, *, cursor: str | None = None, limit: int = 50) -> Page[Plan]:
        """Plans, newest first."""
        return newest_first(self._session, select(Plan), Plan.id, cursor=cursor, limit=limit)
