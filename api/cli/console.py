"""How commands speak: tables for people on stdout, one JSON object for programs, errors on stderr."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console, Group
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

out = Console(highlight=False)
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


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, numeric: Iterable[int] = ()
) -> Group:
    """A title over a plain table; columns listed in ``numeric`` are aligned right."""
    right = set(numeric)
    built = Table(header_style="bold", box=None, pad_edge=False, show_header=any(columns))
    for index, column in enumerate(columns):
        # an id is to be copied: it keeps its line while any other column can give way
        built.add_column(
            column, justify="right" if index in right else "left", overflow="fold", no_wrap=column == "id"
        )
    for row in rows:
        built.add_row(*row)
    return Group(Text(title, style="bold"), built)  # a Table's own title wraps at the table's width


def facts(title: str, pairs: Iterable[tuple[str, Any]]) -> Group:
    """A two-column table of names and values."""
    return table(title, ("", ""), [(name, str(value)) for name, value in pairs])
