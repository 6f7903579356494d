"""``flatpeak worker``: executes queued sweeps on this machine."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from api.cli.console import DatabaseOption, JsonFlag, emit_json, err, out
from api.cli.executors import ExecutorOption, RayAddressOption
from api.cli.stopping import Stopping
from api.cli.sweep_live import progress_note

if TYPE_CHECKING:
    from tuner.sweeping.sweep import SweepProgress


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("worker")(worker)


def worker(
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="End when no sweep that this machine can run is left.")
    ] = False,
    executor: ExecutorOption = "local",
    ray_address: RayAddressOption = None,
    database: DatabaseOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Run the trials of queued sweeps until stopped. Several workers share one database.

    Example:

      flatpeak worker --database postgresql+psycopg://flatpeak@db/flatpeak

    SIGTERM or Ctrl-C gives the running trial back to the queue. With --json progress is a line of JSON
    on standard error for every trial, and the object at the end holds each sweep's last one.
    """
    from api.services.store import open_database
    from tuner.executors.choice import make_executor
    from tuner.sweeping.worker import Worker

    store = open_database(database)
    last: dict[str, SweepProgress] = {}

    def tell(now: SweepProgress) -> None:
        before = last.get(now.sweep_id)
        last[now.sweep_id] = now
        if before is not None and (before.ended, before.state) == (now.ended, now.state):
            return
        if as_json:
            sys.stderr.write(json.dumps(_progress(now)) + "\n")
            sys.stderr.flush()
        else:
            err.print(f"{now.sweep_id} {now.ended}/{now.total} {progress_note(now)}", markup=False)

    runner = Worker(store, lambda: make_executor(executor, ray_address), progress=tell)
    if not as_json:
        err.print(f"Worker {runner.name} on {store.url}", markup=False)

    try:
        with Stopping() as stopping:
            runner.run(lambda: stopping.asked() or (until_idle and not runner.may_work()))
    finally:
        runner.close()
        store.close()
    if as_json:
        emit_json({"worker": runner.name, "sweeps": [_progress(now) for now in last.values()]})
        return
    sweeps = ", ".join(f"{now.sweep_id} {now.state} {now.ended}/{now.total}" for now in last.values())
    out.print(f"Worked on {sweeps or 'nothing'}", markup=False, soft_wrap=True)


def _progress(now: SweepProgress) -> dict[str, object]:
    return {
        "sweep_id": now.sweep_id,
        "state": now.state.value,
        "ended": now.ended,
        "total": now.total,
        "trials": now.counts,
        "best_latency_s": now.best_latency_s,
    }
