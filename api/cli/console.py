"""How commands speak: tables for people on stdout, one JSON object for programs, errors on stderr."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import typer
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from api.errors import plain

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
DatabaseOption = Annotated[
    str | None,
    typer.Option(
        "--database",
        metavar="URL",
        envvar="FLATPEAK_DATABASE",
        help="SQLAlchemy URL; without it sqlite:///flatpeak.db in this directory.",
    ),
]

_NARROWEST = 16
"""A column of so many characters or fewer is never wrapped."""
_LONGEST_WORD = 40
_GAP = 2
_PIPE_WIDTH = 4096


class _Output(Console):
    """Standard output. What is wider than the terminal runs on in its next line; nothing is cut off."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*objects, **{"crop": False, **options})


out = _Output(highlight=False)
err = Console(stderr=True, highlight=False)


def emit_json(payload: object) -> None:
    """Print ``payload`` as the command's one JSON object."""
    if sys.stdout is None:  # started with standard output closed
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    sys.stdout.write(json.dumps(payload, indent=2, allow_nan=False) + "\n")
    sys.stdout.flush()


def emit_error(rule: str, value: object, remedy: str, *, as_json: bool) -> None:
    """Print a broken rule on stderr: three labelled lines, or one JSON object."""
    if as_json:
        sys.stderr.write(json.dumps({"rule": rule, "value": plain(value), "remedy": remedy}) + "\n")
        return
    for label, style, text in (
        ("Error ", "bold red", rule),
        ("Value ", "yellow", f"{plain(value)}"),
        ("Remedy", "green", remedy),
    ):
        err.print(f"[{style}]{label}[/]", end=" ")
        err.print(text, markup=False, soft_wrap=True)


class _Fitted:
    """A table as wide as the terminal allows: cells wrap between words, and words stay whole even where that is too
    wide."""

    def __init__(self, columns: Sequence[str], rows: list[Sequence[str]], right: set[int]) -> None:
        self._columns, self._rows, self._right = columns, rows, right

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self._widths(options.max_width if console.is_terminal or _columns_set() else _PIPE_WIDTH)
        built = Table(header_style="bold", box=None, pad_edge=False, show_header=any(self._columns))
        for index, (column, width) in enumerate(zip(self._columns, widths, strict=True)):
            justify: Literal["left", "right"] = "right" if index in self._right else "left"
            built.add_column(column, justify=justify, overflow="fold", width=width)
        for row in self._rows:
            built.add_row(*(Text(cell) for cell in row))
        yield from console.render(built, options.update(width=sum(widths) + _GAP * (len(widths) - 1)))

    def _widths(self, most: int) -> list[int]:
        lines = [
            [line for cell in cells for line in (cell.splitlines() or [""])]
            for cells in zip(self._columns, *self._rows, strict=True)
        ]
        widths = [max(map(cell_len, column)) for column in lines]
        words = [
            max((cell_len(word) for line in column for word in line.split()), default=0) for column in lines
        ]
        least = [
            width if width <= _NARROWEST else max(_NARROWEST, min(word, _LONGEST_WORD))
            for width, word in zip(widths, words, strict=True)
        ]
        over = sum(widths) + _GAP * (len(widths) - 1) - most
        while over > 0 and (given := max(w - m for w, m in zip(widths, least, strict=True))) > 0:
            widest = max((w, i) for i, w in enumerate(widths) if w > least[i])[1]
            step = min(over, widths[widest] - least[widest], max(1, given // 4))
            widths[widest] -= step
            over -= step
        return widths


def _columns_set() -> bool:
    return os.environ.get("COLUMNS", "").isdigit()


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, numeric: Iterable[int] = ()
) -> Group:
    """A title over a plain table; columns listed in ``numeric`` are aligned right."""
    return Group(
        Text(title, style="bold", no_wrap=True, overflow="ignore"), _Fitted(columns, [*rows], set(numeric))
    )


def facts(title: str, pairs: Iterable[tuple[str, Any]]) -> Group:
    """A two-column table of names and values."""
    return table(title, ("", ""), [(name, str(value)) for name, value in pairs])
