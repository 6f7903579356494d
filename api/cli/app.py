"""The command tree. Each module adds its own commands and imports what is heavy only when it runs."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from typer.main import get_command

from api.cli import check, database, export, fit, plan, probe, replay, serve, sweep, token, worker
from api.cli.console import out

_ABOUT = """Plan, measure and launch long-context Mixture-of-Experts training.

  flatpeak plan --model config.json --cluster hgx-h200 --context 131072 --global-batch-tokens 524288

Exit codes: 0 done, 1 does not fit or failed, 2 wrong use.
"""


def _version(wanted: bool) -> None:
    if wanted:
        try:
            out.print(f"flatpeak {version('flatpeak')}")
        except PackageNotFoundError:
            out.print("flatpeak (not installed)")
        raise typer.Exit


def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del show_version


def build() -> Callable[..., Any]:
    """The whole command."""
    app = typer.Typer(
        help=_ABOUT,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    for module in (plan, check, sweep, replay, fit, export, probe, serve, worker, database, token):
        module.register(app)
    return get_command(app).main
