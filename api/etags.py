"""Entity tags, and what requests ask of them by If-Match and If-None-Match (RFC 9110, sections 8.8.3 and 13).

A tag is strong: the digest of the very bytes that GET answers. A route that changes something checks the tag in the
transaction that changes it, with the rows locked (:meth:`Conditions.allow_change`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Header, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from api.errors import BadRequest, PreconditionFailed, PreconditionRequired

View = BaseModel | Mapping[str, Any]
"""A resource as the API shows it."""

REVALIDATED = "private, no-cache"
"""Cache-Control of what has a tag: kept by the client alone, and used again only after a 304."""
# Never two runs of blanks next to one another: of a long one that leads nowhere every split would be tried.
_ELEMENT = re.compile(r'[ \t]*(?:(?P<tag>(?:W/)?"[\x21\x23-\x7e\x80-\xff]*")[ \t]*)?(?:,|$)')
_WEAK = "W/"


def represent(view: View) -> bytes:
    """The body of GET."""
    if isinstance(view, BaseModel):
        return view.model_dump_json(by_alias=True).encode()
    return bytes(JSONResponse(dict(view)).body)


def tag_of(content: bytes) -> str:
    """The strong tag of a body, in its quotes."""
    return f'"{hashlib.sha256(content).hexdigest()[:32]}"'


@dataclass(frozen=True, slots=True)
class TagList:
    """A field of tags as it was sent. ``tags`` is None for ``*``: any representation, as long as there is one."""

    text: str
    tags: tuple[str, ...] | None

    def matches_strongly(self, tag: str) -> bool:
        """Whether ``tag`` is among them, weak ones aside."""
        return self.tags is None or tag in self.tags

    def matches_weakly(self, tag: str) -> bool:
        """Whether ``tag`` is among them, whether marked weak or not."""
        return self.tags is None or tag in (one.removeprefix(_WEAK) for one in self.tags)

    @property
    def only_weak(self) -> bool:
        """Whether no tag in it can match strongly."""
        return bool(self.tags) and all(one.startswith(_WEAK) for one in self.tags or ())


def read_tags(name: str, lines: list[str]) -> TagList | None:
    """The field ``name`` from its lines; None when it was not sent.

    Raises:
        BadRequest: it is neither ``*`` nor a list of tags.
    """
    if not lines:
        return None
    text = ", ".join(lines)
    if text.strip(" \t") == "*":
        return TagList(text, None)
    tags, place = [], 0
    while place < len(text):
        found = _ELEMENT.match(text, place)
        if found is None:
            raise BadRequest(
                rule=f'{name} must be * or a list of tags like "3f2a"',
                value=text,
                remedy="Send ETag as GET gave it, with its double quotes.",
            )
        if found["tag"] is not None:
            tags.append(found["tag"])
        place = found.end()
    return TagList(text, tuple(tags))


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a request asks of the resource's tag before it is answered or done."""

    match: TagList | None = None
    none_match: TagList | None = None

    def answer(self, view: View, headers: Mapping[str, str] | None = None) -> Response:
        """The answer to GET: 200 with the tag, or 304 when the client has this representation.

        Raises:
            PreconditionFailed: If-Match names another representation.
        """
        content = represent(view)
        tag = tag_of(content)
        self._check_match(tag)
        sent = {"ETag": tag, "Cache-Control": REVALIDATED, **(headers or {})}
        if self.none_match is not None and self.none_match.matches_weakly(tag):
            return Response(status_code=304, headers=sent)
        return Response(content, media_type="application/json", headers=sent)

    def allow_change(self, view: View) -> None:
        """Go on only if the resource, locked and shown as ``view``, is as the request asks.

        Raises:
            PreconditionFailed: it is not.
        """
        tag = tag_of(represent(view))
        self._check_match(tag)
        if self.none_match is not None and self.none_match.matches_weakly(tag):
            raise PreconditionFailed(
                rule="If-None-Match must not hold the tag of the resource that is changed",
                value=self.none_match.text,
                remedy="It exists as you know it; send If-Match instead, or neither.",
            )

    def allow_replacement(self, view: View) -> None:
        """:meth:`allow_change` of what users have written: If-Match must say which version is replaced.

        Raises:
            PreconditionRequired: there is no If-Match.
            PreconditionFailed: the resource is not as the request asks.
        """
        if self.match is None:
            raise PreconditionRequired(
                rule="If-Match must say which version is replaced",
                value="no If-Match",
                remedy="Send If-Match with the ETag that GET gave; If-Match: * replaces whatever is there.",
            )
        self.allow_change(view)

    def _check_match(self, tag: str) -> None:
        if self.match is None or self.match.matches_strongly(tag):
            return
        weak = "A weak tag never matches here: send it without W/. " if self.match.only_weak else ""
        raise PreconditionFailed(
            rule="If-Match must hold the tag that the resource has now",
            value=self.match.text,
            remedy=f"{weak}GET it again, see what has changed, and send its new ETag.",
        )


def stored(view: View, *, status: int, headers: Mapping[str, str]) -> Response:
    """The answer to a request that has made or changed the resource: what GET would answer, with its tag."""
    content = represent(view)
    return Response(
        content,
        status_code=status,
        media_type="application/json",
        headers={"ETag": tag_of(content), **headers},
    )


def _conditions(
    request: Request,
    if_match: Annotated[
        str | None, Header(description="Go on only if the resource has one of these tags, or exists (*)")
    ] = None,
    if_none_match: Annotated[
        str | None, Header(description="Go on only if the resource has none of these tags")
    ] = None,
) -> Conditions:
    del if_match, if_none_match  # declared for the document; a field may come in several lines
    lines = request.headers.getlist
    return Conditions(
        match=read_tags("If-Match", lines("if-match")),
        none_match=read_tags("If-None-Match", lines("if-none-match")),
    )


Conditional = Annotated[Conditions, Depends(_conditions)]
