"""``flatpeak export``: a plan in the form a training job reads."""

from __future__ import annotations

import json
from errno import EISDIR
from os import getpid
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from api.cli.console import DatabaseOption, JsonFlag, emit_json, out
from api.errors import Failure


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("export")(export)


def export(
    plan: Annotated[
        str, typer.Argument(metavar="PLAN_ID|plan.json", help="A stored plan's id, or a plan saved as JSON.")
    ],
    form: Annotated[
        Literal["launch"], typer.Option("--format", help="launch: for operators.launch.")
    ] = "launch",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write it.")
    ] = None,
    database: DatabaseOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a plan's launch parameters to a file.

    Example:

      flatpeak export plan.json --format launch -o launch.json

    Without -o the file goes to standard output.
    """
    from api.services.planning import export_plan

    exported = export_plan(_plan(plan, database))
    text = json.dumps(exported, indent=2) + "\n"
    if output is None:
        emit_json(exported)
        return
    write_whole(output, text)
    if as_json:
        emit_json({"format": form, "file": str(output)})
    else:
        out.print(f"Wrote {output}", markup=False)


def _plan(text: str, database: str | None) -> dict[str, Any]:
    from api.services.planning import get_plan
    from api.services.specs import read_mapping
    from api.services.store import open_database

    if not text.startswith("pln_") or Path(text).exists():
        return read_mapping(Path(text), "a plan file")
    store = open_database(database)
    try:
        with store.reading() as session:
            return get_plan(session, text)
    finally:
        store.close()


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all.

    A link is followed; a pipe or a device (``/dev/stdout``) is written to, never replaced.

    Raises:
        Failure: the folder is missing or not writable, or the path is a folder.
    """
    try:
        target = path.resolve()
        if target.is_dir():
            raise IsADirectoryError(EISDIR, "it is a folder")
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
        else:
            _replace(target, text)
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL byte
        raise Failure(
            rule="the output file must be writable",
            value=str(path),
            remedy=f"Give the path of a file in a folder you may write to ({_why(error)}).",
        ) from error


def _replace(target: Path, text: str) -> None:
    part = target.with_name(f".{target.name}.{getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(target)
    finally:  # a signal between the two leaves nothing behind either
        part.unlink(missing_ok=True)


def _why(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
