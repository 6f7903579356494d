"""Draw the kept rows of PipelinedLLEP as SVG: latency and peak against K, one line per router, one panel per N.

    python -m benchmarks.plots benchmarks/results/nvidia-h200-x1/pipelined_llep_curves.csv docs/img

The standard library is enough; what is drawn is a few polylines.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP = 250, 190, 52, 46
LINES = {
    "balanced": ("#0b6e99", ""),
    "skew:80/16": ("#c2410c", ""),
    "random": ("#4d7c0f", ""),
    "llep": ("#777777", "6 3"),
    "llep_recompute": ("#777777", "2 3"),
}


@dataclass
class Panel:
    """One token count: points by line name, ``K -> value``."""

    tokens: int
    lines: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))


def read_panels(path: Path, value: Callable[[list[dict[str, str]]], float]) -> list[Panel]:
    """Serial rows of forward and backward, grouped; baselines of the balanced router as level lines.

    Args:
        path: Rows as benchmarks.pipelined_llep writes them.
        value: Of all repeats of one configuration.
    """
    groups: dict[tuple[int, str, int], list[dict[str, str]]] = defaultdict(list)
    for row in csv.DictReader(path.read_text().splitlines()):
        config, shape = json.loads(row["config_json"]), json.loads(row["shape_json"])
        if row["pass"] != "forward_backward" or config["dispatch_schedule"] != "serial":
            continue
        if row["provider"] == "flatpeak":
            name = shape["profile"]
        elif row["provider"] in LINES and shape["profile"] == "balanced":
            name = row["provider"]
        else:
            continue
        groups[shape["tokens"], name, config["chunks"]].append(row)
    panels: dict[int, Panel] = {}
    for (tokens, name, chunks), rows in sorted(groups.items()):
        panels.setdefault(tokens, Panel(tokens)).lines[name][chunks] = value(rows)
    return list(panels.values())


def milliseconds(rows: list[dict[str, str]]) -> float:
    """Median over the repeats."""
    return 1e3 * statistics.median(float(r["seconds"]) for r in rows)


def gibibytes(rows: list[dict[str, str]]) -> float:
    """Peak allocated, everything counted."""
    return max(int(r["allocated_bytes"]) for r in rows) / 2**30


def svg(panels: list[Panel], title: str, unit: str) -> str:
    """All panels side by side, each with its own vertical scale from 0."""
    width, height = len(panels) * (WIDTH + LEFT) + 20, HEIGHT + TOP + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="18" font-size="13" font-weight="bold">{escape(title)}</text>',
    ]
    x = 240 + 4 * len(title)
    for name, (colour, dash) in LINES.items():
        if any(name in panel.lines for panel in panels):
            parts.append(_line([(x, 14.0), (x + 22, 14.0)], colour, dash))
            parts.append(f'<text x="{x + 27}" y="18">{escape(name)}</text>')
            x += 48 + 7 * len(name)
    for i, panel in enumerate(panels):
        parts += _panel(panel, LEFT + i * (WIDTH + LEFT), unit)
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, left: float, unit: str) -> list[str]:
    chunks = sorted({k for line in panel.lines.values() for k in line})
    top = _round_up(max(v for line in panel.lines.values() for v in line.values()))
    widest = math.log2(max(chunks)) or 1.0

    def at(k: int, v: float) -> tuple[float, float]:
        return left + (WIDTH - 14) * math.log2(k) / widest, TOP + HEIGHT * (1 - v / top)

    bottom, right = TOP + HEIGHT, left + WIDTH - 14
    parts = [f'<text x="{left}" y="{TOP - 9}" font-weight="bold">N = {panel.tokens:,}, {unit}</text>']
    for step in range(5):
        value = top * step / 4
        y = at(1, value)[1]
        parts.append(_line([(left, y), (right, y)], "#dddddd", ""))
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    parts += [
        f'<text x="{at(k, 0)[0]:.1f}" y="{bottom + 15}" text-anchor="middle">{k}</text>' for k in chunks
    ]
    parts.append(f'<text x="{(left + right) / 2:.0f}" y="{bottom + 31}" text-anchor="middle">K</text>')
    for name, (colour, dash) in LINES.items():
        line = panel.lines.get(name)
        if not line:
            continue
        if name in {"llep", "llep_recompute"}:  # all at once: one value, drawn across
            y = at(1, line[1])[1]
            parts.append(_line([(left, y), (right, y)], colour, dash))
            continue
        points = [at(k, v) for k, v in sorted(line.items())]
        parts.append(_line(points, colour, dash, 1.8))
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.4" fill="{colour}"/>' for px, py in points]
    return parts


def _line(points: list[tuple[float, float]], colour: str, dash: str, width: float = 1.2) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}/>'


def _round_up(value: float) -> float:
    """The next of 1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8 times a power of ten: quarters of it are short numbers."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if m * power >= value)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, value, title, unit in (
        ("latency", milliseconds, "Forward and backward against K", "ms"),
        ("peak", gibibytes, "Peak memory against K", "GiB"),
    ):
        path = args.folder / f"pipelined_llep_{name}.svg"
        path.write_text(svg(read_panels(args.rows, value), title, unit))
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
