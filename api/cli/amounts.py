"""Counts of tokens as people write them: 131072, 128K, 1M."""

from __future__ import annotations

import re

from api.errors import RuleError

_TOKENS = re.compile(r"([0-9]{1,18})([KkMm]?)", re.ASCII)
_SIZES = {"": 1, "k": 1024, "m": 1024**2}


def tokens_of(text: str, name: str) -> int:
    """The count in ``text``; K is 1024 tokens and M 1024 K.

    Raises:
        RuleError: it is no such count; ``name`` is the option that it was given to.
    """
    found = _TOKENS.fullmatch(text.strip())
    if found is None:
        raise RuleError(
            rule=f"{name} must be a whole number of tokens",
            value=text,
            remedy="For example 131072 or 128K (K = 1024, M = 1024 K).",
        )
    return int(found[1]) * _SIZES[found[2].lower()]
