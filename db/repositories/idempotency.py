"""Idempotency keys: the same request twice makes one resource."""

from __future__ import annotations

import hashlib
import json

from sqlalchemy import select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from cost_model.errors import RuleError
from db.tables import IdempotencyKey, Json


class IdempotencyRepository:
    """Rows of ``idempotency_key``."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def find(self, scope: str, key: str, request: Json) -> str | None:
        """Id of the resource that this key already made, or None.

        Raises:
            RuleError: the key was used for another request.
        """
        row = self._session.get(IdempotencyKey, (scope, key), populate_existing=True)
        if row is None:
            return None
        if row.request_hash != _hash(request):
            raise RuleError(
                rule="an idempotency key stands for one request",
                value=key,
                remedy="Send the same body again, or choose a new key.",
            )
        return row.resource_id

    def remember(self, scope: str, key: str, request: Json, resource_id: str) -> str:
        """Bind the key to the resource made in this transaction.

        Returns:
            ``resource_id``; or, when another transaction was first, the id it made: roll back then.
        """
        values = {"scope": scope, "key": key, "request_hash": _hash(request), "resource_id": resource_id}
        if self._session.get_bind().dialect.name == "postgresql":
            self._session.execute(postgresql.insert(IdempotencyKey).values(**values).on_conflict_do_nothing())
        else:
            self._session.execute(sqlite.insert(IdempotencyKey).values(**values).on_conflict_do_nothing())
        kept = self._session.scalar(
            select(IdempotencyKey.resource_id).where(IdempotencyKey.scope == scope, IdempotencyKey.key == key)
        )
        return kept or resource_id


def _hash(request: Json) -> str:
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
