"""Identifiers: a prefix that says what a thing is, and a part that sorts by time of creation."""

from __future__ import annotations

import secrets
import time

# Crockford's base 32: no letter that is read as a digit.
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def new_id(prefix: str) -> str:
    """``prefix_`` and 26 characters: 48 bits of milliseconds, then 80 random bits."""
    value = (time.time_ns() // 1_000_000 << 80) | secrets.randbits(80)
    return prefix + "_" + "".join(_ALPHABET[(value >> shift) & 31] for shift in range(125, -1, -5))
