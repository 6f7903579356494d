"""``flatpeak sweep``: measure the real operators on real ranks of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from api.cli.console import DatabaseOption, JsonFlag, emit_json, err, out, table
from api.cli.executors import ExecutorOption, RayAddressOption
from api.cli.groups import group_of
from api.cli.stopping import Stopping
from api.cli.sweep_live import Live
from api.cli.sweep_output import SHOWN, report, state_text, target_text

if TYPE_CHECKING:
    from db.session import Database
    from db.tables import Sweep
    from tuner.executors.base import Executor
    from tuner.sweeping.sweep import SweepOutcome

SweepId = Annotated[str, typer.Argument(metavar="SWEEP_ID", help="As `flatpeak sweep list` shows it.")]
_ENDED_WELL = "succeeded"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(
        help="Run a sweep file here (`flatpeak sweep FILE`); list, show, resume and cancel sweeps."
    )
    group.command("run")(run)
    group.command("resume")(resume_one)
    group.command("list")(show_all)
    group.command("show")(show)
    group.command("cancel")(cancel)
    app.add_typer(group, name="sweep", cls=group_of("run", bare=False))


def run(  # noqa: PLR0917 - options of a command
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A sweep file, YAML or JSON.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the newest unfinished sweep of this file, if any.")
    ] = False,
    enqueue: Annotated[bool, typer.Option("--enqueue", help="Only queue it: a worker will run it.")] = False,
    executor: ExecutorOption = "local",
    ray_address: RayAddressOption = None,
    database: DatabaseOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Create the sweep a file describes, or resume it where it stopped, and run it on this machine.

    Example:

      flatpeak sweep examples/sweeps/head.yaml

    What cannot run here is refused and nothing is stored. Ctrl-C gives the running trial back; --resume goes on later
    and repeats no finished trial. Exits with 1 when the sweep failed, paused, was cancelled or was stopped.
    """
    from api.services.resuming import check_place, to_resume, unfinished_of
    from api.services.store import open_database
    from tuner.executors.choice import make_executor
    from tuner.sweeping.sweep import create_sweep, read_sweep_file

    spec = read_sweep_file(file)
    store = open_database(database)
    known = to_resume(store, spec) if resume else None
    other = None if resume else unfinished_of(store, spec)
    if enqueue:
        sweep_id = known.id if known is not None else create_sweep(store, spec)
        _tell_of(other, as_json=as_json)
        report(store, sweep_id, as_json=as_json)
        store.close()
        return
    runner = make_executor(executor, ray_address)
    try:
        check_place(runner, spec)
        sweep_id = known.id if known is not None else create_sweep(store, spec)
        _tell_of(other, as_json=as_json)
        outcome = _drive(store, sweep_id, runner, quiet=as_json)
    finally:
        runner.close()
    _end(store, outcome, as_json=as_json)


def resume_one(
    sweep_id: SweepId,
    executor: ExecutorOption = "local",
    ray_address: RayAddressOption = None,
    database: DatabaseOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Go on with a sweep that stopped or paused, on this machine. No finished trial is repeated.

    Example:

      flatpeak sweep resume swp_01jx…

    Exits as `flatpeak sweep FILE` does. A sweep that has succeeded is only shown.
    """
    from api.services.resuming import by_id, check_place
    from api.services.store import open_database
    from tuner.executors.choice import make_executor
    from tuner.sweeping.sweep import spec_of

    store = open_database(database)
    spec = spec_of(by_id(store, sweep_id))
    runner = make_executor(executor, ray_address)
    try:
        check_place(runner, spec)
        outcome = _drive(store, sweep_id, runner, quiet=as_json)
    finally:
        runner.close()
    _end(store, outcome, as_json=as_json)


def _tell_of(other: Sweep | None, *, as_json: bool) -> None:
    """That a new sweep stands beside one of the same file that has not ended."""
    if other is not None and not as_json:
        err.print(
            f"An earlier sweep of this file has not ended ({other.id}, {other.state}). This is a new one; "
            f"`flatpeak sweep resume {other.id}` goes on with that one, `flatpeak sweep cancel {other.id}` ends it.",
            markup=False,
            soft_wrap=True,
        )


def _drive(store: Database, sweep_id: str, runner: Executor, *, quiet: bool) -> SweepOutcome:
    """Run the sweep until it ends, pauses or somebody stops it."""
    from db.repositories import SweepRepository
    from tuner.sweeping.sweep import run_sweep

    with store.session() as session:
        SweepRepository(session).resume(sweep_id)  # where it was paused
    with Stopping() as stopping, Live(sweep_id, quiet=quiet) as live:
        outcome = run_sweep(store, sweep_id, runner, live.update, stop=stopping.asked)
    if stopping.asked() and outcome.state in ("queued", "running") and not quiet:
        err.print(f"Stopped; `flatpeak sweep resume {sweep_id}` goes on.", markup=False, soft_wrap=True)
    return outcome


def _end(store: Database, outcome: SweepOutcome, *, as_json: bool) -> None:
    report(store, outcome.sweep_id, as_json=as_json)
    store.close()
    raise typer.Exit(0 if outcome.state == _ENDED_WELL else 1)


def show_all(
    limit: Annotated[int, typer.Option("--limit", min=1, max=500, help="Most sweeps to list.")] = 20,
    database: DatabaseOption = None,
    as_json: JsonFlag = False,
) -> None:
    """List sweeps, newest first.

    Example:

      flatpeak sweep list --limit 5
    """
    from api.services.store import open_database
    from api.services.sweeps import list_sweeps

    store = open_database(database)
    with store.reading() as session:
        page = list_sweeps(session, cursor=None, limit=limit, operator=None, state=None)
    store.close()
    if as_json:
        emit_json(page.model_dump())
        return
    rows = [
        (
            s.id,
            s.name,
            s.operator,
            target_text(s),
            state_text(s),
            str(sum(s.trials.values())),
            s.created_at or "",
        )
        for s in page.items
    ]
    out.print(
        table(
            "Sweeps", ("id", "name", "operator", "target", "state", "trials", "created"), rows, numeric=(5,)
        )
    )


def show(
    sweep_id: SweepId,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Most trials in the table.")] = SHOWN,
    everything: Annotated[bool, typer.Option("--all", help="All trials in the table.")] = False,
    database: DatabaseOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Show a sweep and its trials, fastest first.

    Example:

      flatpeak sweep show swp_01jx… --all

    --json always has all of them.
    """
    from api.services.store import open_database

    store = open_database(database)
    report(store, sweep_id, as_json=as_json, most=None if everything else limit)
    store.close()


def cancel(sweep_id: SweepId, database: DatabaseOption = None, as_json: JsonFlag = False) -> None:
    """Cancel a sweep: queued trials at once, running ones when their worker hears of it.

    Example:

      flatpeak sweep cancel swp_01jx…
    """
    from api.services.store import open_database
    from api.services.sweeps import cancel_sweep

    store = open_database(database)
    with store.session() as session:
        view = cancel_sweep(session, sweep_id)
    store.close()
    if as_json:
        emit_json(view.model_dump())
    else:
        out.print(f"Cancelled {sweep_id}", markup=False)
