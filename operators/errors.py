"""The one error every operator raises for a wrong input."""

from __future__ import annotations


class RuleError(ValueError):
    """A value broke a rule.

    Carries the three things a user needs: the rule that was broken, the value that broke it, and what to
    do about it. Callers print them apart; ``str()`` joins them.
    """

    def __init__(self, *, rule: str, value: object, remedy: str) -> None:
        super().__init__(f"{rule} (got {_written(value)}). {remedy}")
        self.rule = rule
        self.value = value
        self.remedy = remedy


def _written(value: object) -> str:
    """``repr(value)``; by its type what has none: lists nested hundreds deep, a number of thousands of digits."""
    try:
        return repr(value)
    except (RecursionError, ValueError):
        return f"a {type(value).__name__} too large to show"
