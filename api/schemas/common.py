"""What every resource shares: times, pages, cursors."""

from __future__ import annotations

import base64
import binascii
from datetime import UTC, datetime
from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from api.errors import BadRequest
from cost_model.field_rules import NumberFields
from cost_model.text_file import unstorable

Item = TypeVar("Item")
MAX_PAGE = 500


class Body(NumberFields):
    """A request body: an unknown key is an error, never silently dropped."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _storable(cls, data: object) -> object:
        """Text that no database takes (NUL, half a surrogate pair) is refused wherever it stands."""
        bad = unstorable(data)
        if bad is not None:
            raise ValueError(f"text must not hold {bad}")
        return data


class Page(BaseModel, Generic[Item]):
    """One page of a collection. ``next_cursor`` is null on the last one."""

    items: list[Item]
    next_cursor: str | None = Field(description="Pass it as ?cursor= to read on; null when nothing follows.")


def timestamp(seconds: float | None) -> str | None:
    """RFC 3339 in UTC with milliseconds, from Unix seconds."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def encode_cursor(key: str | int) -> str:
    """An opaque cursor that stands behind the row with this key."""
    return base64.urlsafe_b64encode(str(key).encode()).decode().rstrip("=")


def decode_cursor(cursor: str | None) -> str | None:
    """The key inside a cursor.

    Raises:
        BadRequest: it is none of ours.
    """
    if not cursor:
        return None
    try:
        key = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode("ascii")
    except (binascii.Error, ValueError):
        key = ""
    if not key or not key.replace("_", "").isalnum():
        raise BadRequest(
            rule="cursor must be one that this service gave out",
            value=cursor[:80],
            remedy="Use next_cursor of the page before, or leave cursor out to start at the beginning.",
        )
    return key


def decode_number(cursor: str | None) -> int | None:
    """The integer key inside a cursor."""
    key = decode_cursor(cursor)
    if key is None:
        return None
    if not key.isdecimal() or len(key) > 18:
        raise BadRequest(
            rule="cursor must be one that this collection gave out",
            value=str(cursor)[:80],
            remedy="Use next_cursor of the page before.",
        )
    return int(key)
