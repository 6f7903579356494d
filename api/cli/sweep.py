"""``flatpeak sweep``: measure the real operators on real ranks of this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from api.cli.console import DatabaseOption, JsonFlag, emit_json, err, facts, out, table
from api.cli.executors import ExecutorOption, RayAddressOption
from api.cli.groups import group_of
from api.cli.stopping import Stopping
from api.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from db.session import Database
    from tuner.sweep import SweepOutcome, SweepProgress, SweepSpec

SweepId = Annotated[str, typer.Argument(metavar="SWEEP_ID", help="As `flatpeak sweep list` shows it.")]
_ENDED_WELL = "succeeded"
_SHOWN = 20


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(help="Run a sweep file here (`flatpeak sweep FILE`); list, show and cancel sweeps.")
    group.command("run")(run)
    group.command("list")(show_all)
    group.command("show")(show)
    group.command("cancel")(cancel)
    app.add_typer(group, name="sweep", cls=group_of("run", bare=False))


def run(  # noqa: PLR0917 - options of a command
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A sweep file, YAML or JSON.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the newest sweep of this file, if there is one.")
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

    Ctrl-C gives the running trial back; --resume goes on later and repeats no finished trial.
    Exits with 1 when the sweep failed, paused or was cancelled.
    """
    from api.services.store import open_database
    from db.repositories import SweepRepository
    from tuner.executors.choice import make_executor
    from tuner.sweep import create_sweep, progress_of, read_sweep_file, run_sweep

    spec = read_sweep_file(file)
    store = open_database(database)
    sweep_id = (_made_before(store, spec) if resume else None) or create_sweep(store, spec)
    if enqueue:
        _report(store, sweep_id, as_json)
        store.close()
        return
    if progress_of(store, sweep_id).state == "paused":
        with store.session() as session:
            SweepRepository(session).resume(sweep_id)
    runner = make_executor(executor, ray_address)
    try:
        with Stopping() as stopping, _Live(sweep_id, quiet=as_json) as live:
            outcome = run_sweep(store, sweep_id, runner, live.update, stop=stopping.asked)
        if stopping.asked():
            err.print("Stopped; the same command with --resume goes on.")
    finally:
        runner.close()
    _report(store, sweep_id, as_json)
    store.close()
    raise typer.Exit(_exit_code(outcome))


def _exit_code(outcome: SweepOutcome) -> int:
    return 0 if outcome.state == _ENDED_WELL else 1


def _made_before(store: Database, spec: SweepSpec) -> str | None:
    """The newest sweep of the same spec that was not given up; the stored shape also holds its defaults."""
    from db.repositories import SweepRepository

    asked = spec.model_dump(mode="json", exclude={"shape"})
    with store.reading() as session:
        for row in SweepRepository(session).page(limit=500, operator=spec.operator).items:
            stored = dict(row.spec_json)
            shape = stored.pop("shape")
            same = stored == asked and all(shape.get(key) == value for key, value in spec.shape.items())
            if same and row.state not in ("cancelled", "failed"):
                return row.id
    return None


def progress_note(now: SweepProgress) -> str:
    """Trials by state, those that wait left out, and the best latency so far."""
    note = " ".join(f"{state} {number}" for state, number in sorted(now.counts.items()) if state != "queued")
    return note if now.best_latency_s is None else f"{note} · best {seconds_text(now.best_latency_s)}"


class _Live:
    """A progress bar on stderr; a line a trial where stderr is no terminal; nothing with ``quiet``."""

    def __init__(self, sweep_id: str, *, quiet: bool) -> None:
        self._id, self._quiet = sweep_id, quiet
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=err,
            disable=quiet or not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task(sweep_id, total=None, note="")
        self._ended = -1

    def __enter__(self) -> _Live:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, now: SweepProgress) -> None:
        note = progress_note(now)
        self._bar.update(self._task, completed=now.ended, total=now.total, note=note)
        if self._bar.disable and not self._quiet and now.ended != self._ended:
            err.print(f"{self._id} {now.ended}/{now.total} {note}", markup=False)
        self._ended = now.ended


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
            f"{s.ranks} × {s.device}",
            s.state,
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


def show(sweep_id: SweepId, database: DatabaseOption = None, as_json: JsonFlag = False) -> None:
    """Show a sweep and its trials, fastest first.

    Example:

      flatpeak sweep show swp_01jx…
    """
    from api.services.store import open_database

    store = open_database(database)
    _report(store, sweep_id, as_json)
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


def _report(store: Database, sweep_id: str, as_json: bool) -> None:
    from api.services.sweeps import get_sweep, list_trials

    with store.reading() as session:
        sweep = get_sweep(session, sweep_id)
        trials = list_trials(session, sweep_id, cursor=None, limit=10_000, states=set(), knobs={}).items
    if as_json:
        emit_json({**sweep.model_dump(), "items": [trial.model_dump() for trial in trials]})
        return
    counts = ", ".join(f"{state} {number}" for state, number in sorted(sweep.trials.items())) or "none"
    pairs = [("state", sweep.state), ("operator", f"{sweep.operator} ({sweep.provider})"), ("trials", counts)]
    if sweep.reason:
        pairs.append(("reason", sweep.reason))
    flagged = [trial for trial in trials if trial.flags]
    if flagged:
        pairs.append(
            ("flagged", f"{len(flagged)} trials: their times are in doubt (the machine was not theirs alone)")
        )
    out.print(facts(f"{sweep.id}  {sweep.name}", pairs))
    trials.sort(key=lambda t: (t.latency_s is None, t.latency_s or 0.0, t.number))
    knobs = list(dict.fromkeys(name for trial in trials for name in trial.config))
    rows = [
        (
            str(t.number),
            *(str(t.config.get(name, "–")) for name in knobs),
            t.state,
            seconds_text(t.latency_s),
            bytes_text(t.peak_bytes),
            bytes_text(t.bound_bytes),
            *((", ".join(sorted({one.flag for one in t.flags})),) if flagged else ()),
            (t.reason or "")[:60],
        )
        for t in trials[:_SHOWN]
    ]
    columns = ("#", *knobs, "state", "latency", "peak", "bound", *(("flags",) if flagged else ()), "reason")
    title = "Trials" if len(trials) <= _SHOWN else f"Trials, the first {_SHOWN} of {len(trials)}"
    out.print(table(title, columns, rows))
