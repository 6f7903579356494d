"""``flatpeak worker``: executes queued sweeps on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from api.cli.console import DatabaseOption, JsonFlag, emit_json, err
from api.cli.executors import ExecutorOption, RayAddressOption
from api.cli.stopping import Stopping
from api.cli.sweep_live import progress_note

if TYPE_CHECKING:
    from tuner.sweep import SweepProgress


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

    SIGTERM or Ctrl-C gives the running trial back to the queue.
    """
    from api.services.store import open_database
    from tuner.executors.choice import make_executor
    from tuner.worker import Worker

    store = open_database(database)
    told: dict[str, int] = {}

    def tell(now: SweepProgress) -> None:
        if told.get(now.sweep_id) != now.ended:
            told[now.sweep_id] = now.ended
            if not as_json:
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
        emit_json({"worker": runner.name, "sweeps": told})
