"""Bearer tokens: shown once, kept as a hash."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from cost_model.errors import RuleError
from db.clock import database_now
from db.ids import new_id
from db.tables import Token

SCOPES = ("read", "write")
_PREFIX = "fp_"


class TokenRepository:
    """Rows of ``token``."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def create(
        self, name: str, scopes: Sequence[str] = ("read",), *, lifetime_s: float | None = None
    ) -> tuple[Token, str]:
        """A new token's row and its text, which is not kept and cannot be shown again.

        Raises:
            RuleError: an unknown scope, or none.
        """
        if not scopes or any(scope not in SCOPES for scope in scopes):
            raise RuleError(
                rule="a token's scopes must be among read and write",
                value=list(scopes),
                remedy="Give --scope read, --scope write, or both.",
            )
        text = _PREFIX + secrets.token_urlsafe(32)
        now = float(self._session.scalar(select(database_now())) or 0.0)
        row = Token(
            id=new_id("tok"),
            name=name,
            token_hash=_hash(text),
            scopes_json=sorted(set(scopes)),
            expires_at=None if lifetime_s is None else now + lifetime_s,
        )
        self._session.add(row)
        self._session.flush()
        self._session.refresh(row)
        return row, text

    def verify(self, text: str) -> Token | None:
        """The valid token of this text, or None. Needs a writing session when ``touch`` is to follow."""
        return self._session.scalar(
            select(Token).where(
                # the text has 256 random bits: an index lookup by hash leaks nothing that helps to guess it
                Token.token_hash == _hash(text),
                Token.revoked_at.is_(None),
                (Token.expires_at.is_(None)) | (Token.expires_at > database_now()),
            )
        )

    def touch(self, token_id: str) -> None:
        """Remember that the token was used now."""
        self._session.execute(update(Token).where(Token.id == token_id).values(last_used_at=database_now()))

    def revoke(self, token_id: str) -> bool:
        """End a token. False when it does not exist or has been revoked."""
        ended = self._session.scalar(
            update(Token)
            .where(Token.id == token_id, Token.revoked_at.is_(None))
            .values(revoked_at=database_now())
            .returning(Token.id)
        )
        return ended is not None

    def all(self) -> list[Token]:
        """Every token, newest first."""
        return list(self._session.scalars(select(Token).order_by(Token.id.desc())))

    def any_valid(self) -> bool:
        """Whether at least one token can be used now."""
        valid = Token.revoked_at.is_(None) & (
            (Token.expires_at.is_(None)) | (Token.expires_at > database_now())
        )
        return bool(self._session.scalar(select(func.count()).select_from(Token).where(valid)))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
