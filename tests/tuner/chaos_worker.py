"""A worker as its own process, with short leases: ``python -m tests.tuner.chaos_worker URL EXECUTOR [SWEEP_FILE]``.

EXECUTOR is ``local`` or a Ray cluster's address. With a file it is the controller: it makes the sweep, once however
often it is started, and drives it; else it is a worker of whatever is queued. SIGTERM ends it in order.
"""

from __future__ import annotations

import signal
import sys
import threading

from db.session import Database
from tuner.executors.base import Executor
from tuner.executors.local import LocalExecutor
from tuner.sweeping.sweep import create_sweep, read_sweep_file, run_sweep
from tuner.sweeping.trial import Leases
from tuner.sweeping.worker import Worker

LEASES = Leases(lease_s=2.0, heartbeat_s=0.3)


def main() -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    url, where, *file = sys.argv[1:]

    def executor() -> Executor:
        if where == "local":
            return LocalExecutor()
        from tuner.executors.ray import RayExecutor

        return RayExecutor(where, cpus_per_rank=0.5)

    database = Database(url)
    if file:
        sweep_id = create_sweep(database, read_sweep_file(file[0]), idempotency_key="the only one")
        made = executor()
        try:
            run_sweep(database, sweep_id, made, leases=LEASES, stop=stop.is_set)
        finally:
            made.close()
        return
    worker = Worker(database, executor, leases=LEASES)
    try:
        worker.run(stop)
    finally:
        worker.close()


if __name__ == "__main__":
    main()
