"""Errors of the ways in. Each names the rule, the value and the remedy, like every other error of flatpeak."""

from __future__ import annotations

import math

from sqlalchemy.exc import DBAPIError

from cost_model.errors import RuleError, written

__all__ = [
    "BadRequest",
    "Conflict",
    "Failure",
    "Forbidden",
    "NotFound",
    "PreconditionFailed",
    "PreconditionRequired",
    "RuleError",
    "TooLarge",
    "Unauthorized",
    "UnreachableDatabase",
    "broken_rule",
    "exit_code",
    "is_database_fault",
    "plain",
]


_WIDEST_INTEGER = 10**400
"""A number of more digits is shown as text, cut short."""


class Failure(RuleError):
    """The request was well formed, but the world did not allow it (exit code 1)."""

    status = 503


class UnreachableDatabase(Failure):
    """The database does not answer, or its schema is not the one this version needs."""


# What lists the things of a kind, by the way that somebody came in: address, command, page.
_LISTS = {
    "sweep": ("GET /v1/sweeps", "`flatpeak sweep list`", "The page Sweeps"),
    "trial": ("GET /v1/sweeps/{id}/trials", "`flatpeak sweep show SWEEP_ID --json`", "The page of its sweep"),
    "plan": ("GET /v1/plans", "`flatpeak plan list`", "The page Plans"),
    "cost model": ("GET /v1/cost-models", "`flatpeak fit list`", "The page Cost models"),
    "stored model": ("GET /v1/models", "The form of `flatpeak serve`", "The form on the page Plan"),
    "stored cluster": ("GET /v1/clusters", "The form of `flatpeak serve`", "The form on the page Plan"),
    "example model": ("GET /v1/models", "The form of `flatpeak serve`", "The form on the page Plan"),
    "token": ("`flatpeak token list`", "`flatpeak token list`", "`flatpeak token list`"),
}


class NotFound(RuleError):
    """Nothing is stored under that id.

    ``remedy`` is for a program that speaks HTTP; ``in_shell`` and ``on_page`` are for people.
    """

    status = 404

    def __init__(self, thing: str, value: object) -> None:
        address, command, page = _LISTS[thing]
        article = "an" if thing.startswith("e") else "a"
        super().__init__(
            rule=f"{article} {thing} must exist under that id", value=value, remedy=f"{address} lists them."
        )
        self.in_shell = f"{command} lists them."
        self.on_page = f"{page} lists them."


class Conflict(RuleError):
    """The thing is in a state that does not allow the request."""

    status = 409


class PreconditionFailed(RuleError):
    """The resource is not as the request's If-Match or If-None-Match asks."""

    status = 412


class PreconditionRequired(RuleError):
    """The request would replace what somebody wrote, and does not say which version."""

    status = 428


class Unauthorized(RuleError):
    """No valid token came with the request."""

    status = 401


class Forbidden(RuleError):
    """The token is valid but does not carry the scope."""

    status = 403


class BadRequest(RuleError):
    """The request is not readable at all."""

    status = 400


class TooLarge(RuleError):
    """The body, or a figure inside it, is over a limit."""

    status = 413


def broken_rule(error: BaseException, *, in_shell: bool = False) -> tuple[str, object, str] | None:
    """``(rule, value, remedy)`` of any error that carries the three; None for the rest.

    With ``in_shell`` the remedy is the one for the command line, where the error has one of its own.

    The operators have a RuleError class of their own (they import nothing of flatpeak), so the shape decides.
    """
    rule, remedy = getattr(error, "rule", None), getattr(error, "remedy", None)
    if isinstance(rule, str) and isinstance(remedy, str):
        shown = getattr(error, "in_shell", remedy) if in_shell else remedy
        return rule, getattr(error, "value", None), shown
    return None


def exit_code(error: BaseException) -> int:
    """1 when something failed, 2 when it was asked for wrongly."""
    failed = isinstance(error, (Failure, Conflict, Unauthorized))
    return 1 if failed or is_database_fault(error) else 2


def is_database_fault(error: BaseException) -> bool:
    """Whether a broken rule is the database's own (not reachable, no tables)."""
    return isinstance(error, UnreachableDatabase) or isinstance(error.__cause__, DBAPIError)


def plain(value: object, levels: int = 4) -> object:
    """``value`` as JSON can carry it: scalars and short lists as they are, anything else as a short text.

    Lists are kept ``levels`` deep.
    """
    if isinstance(value, str):
        return encodable(value[:500])
    if value is None or isinstance(value, bool) or (isinstance(value, int) and abs(value) < _WIDEST_INTEGER):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple)) and len(value) <= 50 and levels > 0:
        return [plain(item, levels - 1) for item in value]
    try:
        return encodable(str(value)[:500])
    except (RecursionError, ValueError):  # nested hundreds deep, or a number of thousands of digits
        return written(value)


def encodable(text: str) -> str:
    """``text`` as UTF-8 can carry it: halves of surrogate pairs become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")
