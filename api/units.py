"""How bytes and seconds are written for people, on the terminal and on pages."""

from __future__ import annotations

import re

_BYTE_STEPS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_SECOND_STEPS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def bytes_text(value: float | None) -> str:
    """``value`` bytes in the binary unit that keeps it at least 1, two decimals; a dash for None."""
    if value is None:
        return "–"
    for unit, size in _BYTE_STEPS:
        if abs(value) >= size:
            return f"{value / size:,.2f} {unit}"
    return f"{value:,.0f} B"


def seconds_text(value: float | None) -> str:
    """``value`` seconds in s, ms or µs with three significant digits; a dash for None."""
    if value is None:
        return "–"
    for unit, size in _SECOND_STEPS:
        if abs(value) >= size:
            scaled = value / size
            decimals = 0 if abs(scaled) >= 100 else 1 if abs(scaled) >= 10 else 2
            return f"{scaled:,.{decimals}f} {unit}"
    return "0 s" if value == 0 else f"{value:.2e} s"


def count_text(value: float | None) -> str:
    """A count with thousands separators; a dash for None."""
    return "–" if value is None else f"{value:,.0f}"


_BYTES = re.compile(r"(?<![\w.])(\d{4,}) bytes")


def reason_text(reason: str | None, most: int | None = None) -> str:
    """A reason as people read it: counts of bytes in binary units where that keeps them apart, on one line.

    Args:
        most: characters to show; a longer reason ends at a word, with an ellipsis.
    """
    text = " ".join((reason or "").split())
    written = {number: bytes_text(int(number)) for number in _BYTES.findall(text)}
    if len(set(written.values())) == len(written):
        text = _BYTES.sub(lambda match: written[match[1]], text)
    if most is None or len(text) <= most:
        return text
    head, _, _ = text[: most - 1].rpartition(" ")
    return f"{head} …" if head else f"{text[: most - 1]}…"
