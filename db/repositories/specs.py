"""Model and cluster specifications kept under names."""

from __future__ import annotations

from typing import Generic, TypeVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from db.ids import new_id
from db.repositories.paging import Page, newest_first
from db.tables import Json, StoredCluster, StoredModel

Row = TypeVar("Row", StoredModel, StoredCluster)


class SpecRepository(Generic[Row]):
    """What holds for both kinds."""

    table: type[Row]
    prefix: str

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, name: str, spec: Json, **columns: str | None) -> Row:
        """Store a new specification.

        Raises:
            IntegrityError: the name is taken.
        """
        row = self.table(id=new_id(self.prefix), name=name, spec_json=spec, **columns)
        self._session.add(row)
        return self._written(row)

    def replace(self, row: Row, name: str, spec: Json, **columns: str | None) -> Row:
        """Write another specification, and name, over one that is stored; it keeps its id.

        Raises:
            IntegrityError: another row has the name.
        """
        for column, value in {"name": name, "spec_json": spec, **columns}.items():
            setattr(row, column, value)
        return self._written(row)

    def rollback(self) -> None:
        """Leave the transaction as it was, after an IntegrityError."""
        self._session.rollback()

    def named(self, name: str) -> Row | None:
        return self._session.scalar(select(self.table).where(self.table.name == name))

    def find(self, id_or_name: str, *, lock: bool = False) -> Row | None:
        """The row of this id, else of this name; with ``lock``, it is held until the transaction ends."""
        query = select(self.table).where((self.table.id == id_or_name) | (self.table.name == id_or_name))
        query = query.order_by((self.table.id == id_or_name).desc()).limit(1)
        query = query.execution_options(populate_existing=True)
        return self._session.scalar(query.with_for_update(key_share=True) if lock else query)

    def page(self, *, cursor: str | None = None, limit: int = 50) -> Page[Row]:
        """Specifications, newest first."""
        return newest_first(self._session, select(self.table), self.table.id, cursor=cursor, limit=limit)

    def _put(self, name: str, spec: Json, **columns: str | None) -> Row:
        row = self.named(name)
        return self.add(name, spec, **columns) if row is None else self.replace(row, name, spec, **columns)

    def _written(self, row: Row) -> Row:
        self._session.flush()
        self._session.refresh(row)
        return row


class ModelRepository(SpecRepository[StoredModel]):
    """Rows of ``stored_model``."""

    table = StoredModel
    prefix = "mdl"

    def put(self, name: str, spec: Json) -> StoredModel:
        """Store a specification; one of the same name is replaced and keeps its id."""
        return self._put(name, spec)


class ClusterRepository(SpecRepository[StoredCluster]):
    """Rows of ``stored_cluster``."""

    table = StoredCluster
    prefix = "cls"

    def put(self, name: str, spec: Json, *, hardware_id: str | None = None) -> StoredCluster:
        """Store a specification; one of the same name is replaced and keeps its id."""
        return self._put(name, spec, hardware_id=hardware_id)
