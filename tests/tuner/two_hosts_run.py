"""Run inside the first of two hosts: small sweeps over both, over one, and bound to what is not there.

    python -m tests.tuner.two_hosts_run DATABASE RAY_ADDRESS

Prints JSON: what became of each of them.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from cost_model.errors import RuleError
from db.repositories import TrialRepository
from db.session import Database
from tuner.executors.ray import RayExecutor
from tuner.machine.fingerprint import local_hardware_id
from tuner.sweeping.sweep import create_sweep, parse_sweep, run_sweep
from tuner.sweeping.worker import Worker

NETWORK, ELSEWHERE = "tbf-100mbit", "tbf-1gbit"
SWEEP: dict[str, Any] = {
    "operator": "ring_dtp",
    "shape": {"tokens_per_rank": 64, "hidden": 32, "vocab": 256},
    "space": {"ring_mode": ["weights"], "strip_rows": [64]},
}


def main(url: str, address: str) -> None:
    """The program."""
    database = Database(url)
    database.migrate()
    over_two, elsewhere = (local_hardware_id("cpu", name) for name in (NETWORK, ELSEWHERE))

    def made(**target: Any) -> str:
        return create_sweep(database, parse_sweep({**SWEEP, "target": {"ranks": 2, **target}}))

    executor = RayExecutor(address)
    said: dict[str, str] = {}
    for name, target in (("two", {"nodes": 2, "hardware_id": over_two}), ("one", {"nodes": 1})):
        said[name] = run_sweep(database, made(**target), executor).state.value
    try:
        run_sweep(database, made(nodes=2, hardware_id=elsewhere), executor)
    except RuleError as error:
        said["elsewhere"] = str(error)
    bound = made(hardware_id=over_two)  # of one node, where that hardware is two: no worker here may take it
    worker = Worker(database, lambda: executor)
    worker.run(lambda: not worker.may_work())
    executor.close()
    with database.reading() as session:
        (trial,) = TrialRepository(session).of_sweep(bound)
    said["bound"] = f"{trial.state} {trial.reason_kind}: {trial.reason}"
    database.close()
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
