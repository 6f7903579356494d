"""A worker as its own process, with short leases: ``python -m tests.tuner.chaos_worker URL EXECUTOR [SWEEP]``.

EXECUTOR is ``local`` or a Ray cluster's address. With SWEEP it is the controller of that sweep, else a worker of
whatever is queued. SIGTERM ends it in order.
"""

from __future__ import annotations

import signal
import sys
import threading

from db.session import Database
from tuner.executors.base import Executor
from tuner.executors.local import LocalExecutor
from tuner.sweep import run_sweep
from tuner.trial import Leases
from tuner.worker import Worker

LEASES = Leases(lease_s=2.0, heartbeat_s=0.3)


def main() -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    url, where, *sweep = sys.argv[1:]

    def executor() -> Executor:
        if where == "local":
            return LocalExecutor()
        from tuner.executors.ray import RayExecutor

        return RayExecutor(where, cpus_per_rank=0.5)

    database = Database(url)
    if sweep:
        made = executor()
        try:
            run_sweep(database, sweep[0], made, leases=LEASES, stop=stop.is_set)
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
