"""Cost models: every fit is a version, at most one per hardware is promoted."""

from __future__ import annotations

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from db.ids import new_id
from db.repositories.paging import Page, newest_first
from db.tables import CostModelRow, Json


class CostModelRepository:
    """Rows of ``cost_model``."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(
        self, hardware_id: str, model: Json, *, report: Json | None = None, promoted: bool = False
    ) -> CostModelRow:
        """Store a fit as the next version of its hardware; promoted, it replaces the one in use."""
        newest = self._session.scalar(
            select(func.max(CostModelRow.version)).where(CostModelRow.hardware_id == hardware_id)
        )
        row = CostModelRow(
            id=new_id("cm"),
            hardware_id=hardware_id,
            version=(newest or 0) + 1,
            model_json=model,
            report_json=report,
        )
        self._session.add(row)
        self._session.flush()
        if promoted:
            self.promote(row.id)
        self._session.refresh(row)
        return row

    def promote(self, cost_model_id: str) -> bool:
        """Make this version the one in use for its hardware. False when there is none of this id."""
        row = self._session.get(CostModelRow, cost_model_id)
        if row is None:
            return False
        self._session.execute(
            update(CostModelRow)
            .where(CostModelRow.hardware_id == row.hardware_id)
            .values(promoted=CostModelRow.id == cost_model_id)
        )
        return True

    def find(self, cost_model_id: str) -> CostModelRow | None:
        return self._session.get(CostModelRow, cost_model_id)

    def current(self, hardware_id: str) -> CostModelRow | None:
        """The promoted version of exactly this hardware, or None: another's is never a stand-in."""
        return self._session.scalar(
            select(CostModelRow).where(
                CostModelRow.hardware_id == hardware_id, CostModelRow.promoted.is_(True)
            )
        )

    def page(
        self, *, cursor: str | None = None, limit: int = 50, hardware_id: str | None = None
    ) -> Page[CostModelRow]:
        """Versions, newest first."""
        query = select(CostModelRow)
        if hardware_id is not None:
            query = query.where(CostModelRow.hardware_id == hardware_id)
        return newest_first(self._session, query, CostModelRow.id, cursor=cursor, limit=limit)
