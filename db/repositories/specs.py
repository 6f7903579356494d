"""Model and cluster specifications kept under names."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from db.ids import new_id
from db.repositories.paging import Page, newest_first
from db.tables import Json, StoredCluster, StoredModel


class ModelRepository:
    """Rows of ``stored_model``."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def put(self, name: str, spec: Json) -> StoredModel:
        """Store a specification; one of the same name is replaced and keeps its id."""
        row = self._session.scalar(select(StoredModel).where(StoredModel.name == name))
        if row is None:
            row = StoredModel(id=new_id("mdl"), name=name)
            self._session.add(row)
        row.spec_json = spec
        self._session.flush()
        self._session.refresh(row)
        return row

    def find(self, id_or_name: str) -> StoredModel | None:
        return self._session.scalar(
            select(StoredModel).where((StoredModel.id == id_or_name) | (StoredModel.name == id_or_name))
        )

    def page(self, *, cursor: str | None = None, limit: int = 50) -> Page[StoredModel]:
        """Specifications, newest first."""
        return newest_first(self._session, select(StoredModel), StoredModel.id, cursor=cursor, limit=limit)


class ClusterRepository:
    """Rows of ``stored_cluster``."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def put(self, name: str, spec: Json, *, hardware_id: str | None = None) -> StoredCluster:
        """Store a specification; one of the same name is replaced and keeps its id."""
        row = self._session.scalar(select(StoredCluster).where(StoredCluster.name == name))
        if row is None:
            row = StoredCluster(id=new_id("cls"), name=name)
            self._session.add(row)
        row.spec_json, row.hardware_id = spec, hardware_id
        self._session.flush()
        self._session.refresh(row)
        return row

    def find(self, id_or_name: str) -> StoredCluster | None:
        return self._session.scalar(
            select(StoredCluster).where((StoredCluster.id == id_or_name) | (StoredCluster.name == id_or_name))
        )

    def page(self, *, cursor: str | None = None, limit: int = 50) -> Page[StoredCluster]:
        """Specifications, newest first."""
        return newest_first(
            self._session, select(StoredCluster), StoredCluster.id, cursor=cursor, limit=limit
        )
