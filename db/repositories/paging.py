"""Keyset pages: stable while rows are added, and as cheap at the end as at the start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import ColumnElement, Select
from sqlalchemy.orm import InstrumentedAttribute, Session

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Page(Generic[Row]):
    """Some rows, and the cursor that continues after them (None at the end)."""

    items: list[Row]
    next_cursor: str | None


def newest_first(
    session: Session,
    query: Select[Row],
    key: InstrumentedAttribute[str],
    *,
    cursor: str | None,
    limit: int,
) -> Page[Row]:
    """A page by falling id (ids sort by time of creation); the cursor is the last id shown."""
    if cursor is not None:
        query = query.where(key < cursor)
    return _page(session, query.order_by(key.desc()), key, limit)


def by_number(
    session: Session,
    query: Select[Row],
    key: InstrumentedAttribute[int],
    *,
    cursor: str | None,
    limit: int,
) -> Page[Row]:
    """A page by rising number; the cursor is the last number shown (an unreadable one starts anew)."""
    if cursor is not None and cursor.isascii() and cursor.isdigit():
        after: ColumnElement[bool] = key > int(cursor)
        query = query.where(after)
    return _page(session, query.order_by(key), key, limit)


def _page(session: Session, query: Select[Row], key: InstrumentedAttribute[Any], limit: int) -> Page[Row]:
    rows = list(session.scalars(query.limit(limit + 1)))
    more = len(rows) > limit
    rows = rows[:limit]
    return Page(rows, str(getattr(rows[-1], key.key)) if more else None)
