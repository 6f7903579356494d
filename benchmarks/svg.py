"""Line charts as SVG text: small multiples with a logarithmic y axis, nothing but the standard library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_COLOURS = ("#0b6e4f", "#2f9e77", "#c0392b", "#8e44ad", "#7f8c8d", "#d35400", "#2c3e50")
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 250, 170, 52, 46, 62


@dataclass(frozen=True)
class Line:
    """y at x = 1, 2, 3…; values that are not finite are left out, values at the floor are drawn on it."""

    name: str
    ys: Sequence[float]


def panels(
    drawn: Mapping[str, Sequence[Line]], *, x: str, y: str, mark: float | None = None, floor: float = 0.1
) -> str:
    """One chart a key, side by side, with one legend.

    Args:
        mark: a y that gets a dashed line.
        floor: smallest y of the logarithmic axis.
    """
    top = max(
        (v for lines in drawn.values() for line in lines for v in line.ys if math.isfinite(v)), default=1.0
    )
    top = max(10.0 ** math.ceil(math.log10(max(top, 10 * floor))), 10 * floor)
    names = list(dict.fromkeys(line.name for lines in drawn.values() for line in lines))
    colour = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    columns = min(3, max(1, len(drawn)))
    rows = -(-len(drawn) // columns)
    width = _LEFT + columns * (_WIDTH + _GAP)
    height = _TOP + rows * (_HEIGHT + _GAP)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="11"><rect width="{width}" height="{height}" fill="white"/>'
    ]
    for i, name in enumerate(names):
        out.append(f'<rect x="{_LEFT + 92 * i}" y="8" width="14" height="3" fill="{colour[name]}"/>')
        out.append(f'<text x="{_LEFT + 18 + 92 * i}" y="13">{escape(name)}</text>')
    for number, (title, lines) in enumerate(drawn.items()):
        left = _LEFT + (number % columns) * (_WIDTH + _GAP)
        head = _TOP + (number // columns) * (_HEIGHT + _GAP)
        out += _panel(title, lines, colour, place=(left, head), span=(floor, top), mark=mark)
    out.append(f'<text x="{_LEFT}" y="{height - 6}">x: {escape(x)}; y: {escape(y)}</text></svg>')
    return "\n".join(out) + "\n"


def _panel(
    title: str,
    lines: Sequence[Line],
    colour: Mapping[str, str],
    *,
    place: tuple[int, int],
    span: tuple[float, float],
    mark: float | None,
) -> list[str]:
    left, head = place
    low, high = (math.log10(v) for v in span)
    count = max(len(line.ys) for line in lines)

    def down(value: float) -> float:
        share = (math.log10(max(value, span[0])) - low) / (high - low)
        return head + _HEIGHT * (1.0 - min(1.0, share))

    def across(number: int) -> float:
        return left + _WIDTH * (number - 1) / max(1, count - 1)

    out = [
        f'<text x="{left}" y="{head - 6}" font-weight="bold">{escape(title)}</text>',
        f'<rect x="{left}" y="{head}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#bbb"/>',
    ]
    for power in range(math.ceil(low), math.floor(high) + 1):
        level = down(10.0**power)
        out.append(f'<text x="{left - 5}" y="{level + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
        out.append(f'<path d="M{left} {level:.1f}h{_WIDTH}" stroke="#eee"/>')
    out += [
        f'<text x="{across(number):.1f}" y="{head + _HEIGHT + 14}" text-anchor="middle">{number}</text>'
        for number in range(1, count + 1, max(1, count // 8))
    ]
    if mark is not None:
        out.append(f'<path d="M{left} {down(mark):.1f}h{_WIDTH}" stroke="#999" stroke-dasharray="4 3"/>')
    for line in lines:
        ends = [f"{across(i):.1f},{down(v):.1f}" for i, v in enumerate(line.ys, 1) if math.isfinite(v)]
        if ends:
            out.append(
                f'<polyline points="{" ".join(ends)}" fill="none" stroke="{colour[line.name]}" stroke-width="1.8"/>'
            )
    return out
