"""The one error every operator raises for a wrong input."""

from __future__ import annotations


class RuleError(ValueError):
    """A value broke a rule.

    Carries the three things a user needs: the rule that was broken, the value that broke it, and what to
    do about it. Callers print them apart; ``str()`` joins them.
    """

    def __init__(self, *, rule: str, value: object, remedy: str) -> None:
        super().__init__(f"{rule} (got {value!r}). {remedy}")
        self.rule = rule
        self.value = value
        self.remedy = remedy
