"""A worker: claims trials, runs them, reaps what others left; leaves cleanly when told to."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING

from cost_model.errors import RuleError
from db.lifecycle import TrialState
from db.repositories import Claim, SweepRepository, TrialRepository
from db.session import Database, DatabaseUnreachable
from tuner.executors.base import Executor, Site
from tuner.process_start import process_start
from tuner.trial import Leases, failures_pause, run_trial

if TYPE_CHECKING:
    from tuner.sweep import SweepProgress

_IDLE_S = 1.0
_IDLE_STEP_S = 0.1
# A database that restarts is waited for; one that stays away is an error.
_PATIENCE_S = 300.0


class Worker:
    """Works on one sweep until it ends, or on every sweep that this machine can run until stopped.

    Args:
        executor_factory: called once, for the first trial.
        sweep_id: the only sweep to work on; the worker then ends with it.
        progress: called after each step of a trial with where its sweep stands.
    """

    def __init__(
        self,
        database: Database,
        executor_factory: Callable[[], Executor],
        *,
        sweep_id: str | None = None,
        leases: Leases | None = None,
        progress: Callable[[SweepProgress], None] | None = None,
    ) -> None:
        self._database = database
        self._factory = executor_factory
        self._executor: Executor | None = None
        self._sweep_id = sweep_id
        self._leases = leases or Leases()
        self._progress = progress
        self.name = worker_name()

    def run(self, stop: Callable[[], bool] | threading.Event) -> None:
        """Work until ``stop`` (asked, or set), or until the one sweep has ended or paused.

        A trial that runs when ``stop`` comes goes back to the queue and is not counted as lost.

        Raises:
            RuleError: the one sweep does not fit, or the database has been away for minutes.
        """
        asked = stop.is_set if isinstance(stop, threading.Event) else stop
        heard = monotonic()
        while not asked():
            try:
                if self._step(asked):
                    heard = monotonic()
                    continue
                if self._sweep_id is not None and not self._active():
                    return
                heard = monotonic()
            except DatabaseUnreachable:
                if monotonic() - heard > _PATIENCE_S:
                    raise
            for _ in range(round(_IDLE_S / _IDLE_STEP_S)):
                if asked():
                    return
                sleep(_IDLE_STEP_S)

    def close(self) -> None:
        """End the gangs of the executor that this worker made."""
        if self._executor is not None:
            self._executor.close()
            self._executor = None

    def _step(self, stop: Callable[[], bool]) -> bool:
        """Do one trial, or end what has no more; whether there was anything to do."""
        from tuner.sweep import extend_sweep, spec_of

        self._take_back()
        claim = self._claim()
        if claim is None:
            return self._extend_or_settle(extend_sweep)
        sweep_id = claim.trial.sweep_id
        with self._database.session() as session:
            sweeps = SweepRepository(session)
            sweeps.mark_running(sweep_id)
            spec = spec_of(sweeps.get(sweep_id))
        self._tell(sweep_id, claim, {"phase": "placing"})
        state = run_trial(
            self._database,
            claim,
            spec,
            self._made(),
            leases=self._leases,
            stop=stop,
            on_progress=lambda phase: self._tell(sweep_id, claim, phase),
        )
        if state in (TrialState.FAILED, TrialState.LOST):
            failures_pause(self._database, sweep_id)
        self._tell(sweep_id, None, None)
        return True

    def _extend_or_settle(self, extend: Callable[[Database, str, Site], bool]) -> bool:
        from tuner.sweep import spec_of

        moved = False
        with self._database.reading() as session:
            active = SweepRepository(session).active()
        for sweep in active:
            if self._sweep_id is not None and sweep.id != self._sweep_id:
                continue
            if not self._fits(sweep.ranks, sweep.device):
                continue
            if sweep.hardware_id not in (None, *self._hardware(sweep.device)):
                continue
            site = self._made().site(sweep.device, spec_of(sweep).target.nodes)
            more = extend(self._database, sweep.id, site)
            with self._database.session() as session:
                trials = TrialRepository(session).of_sweep(sweep.id, state=TrialState.QUEUED.value)
                state = SweepRepository(session).settle(sweep.id, complete=not more)
            moved |= bool(trials)
            if state.value != sweep.state:
                self._tell(sweep.id, None, None)
        return moved

    def _hardware(self, device: str) -> list[str]:
        """What gangs stand on here, on one node and over several; a trial looks again at which it needs."""
        return [self._made().site(device, nodes).hardware_id for nodes in (1, 2)]

    def _fits(self, ranks: int, device: str) -> bool:
        return self._made().max_ranks(device) >= ranks

    def _claim(self) -> Claim | None:
        executor = self._made()
        room = {device: executor.max_ranks(device) for device in ("cuda", "cpu")}
        for device, ranks in room.items():
            if ranks == 0:
                continue
            with self._database.session() as session:
                claim = TrialRepository(session).claim(
                    self.name,
                    lease_s=self._leases.lease_s,
                    sweep_id=self._sweep_id,
                    max_ranks=ranks,
                    devices=[device],
                    hardware_ids=self._hardware(device),
                )
            if claim is not None:
                return claim
        return None

    def _take_back(self) -> None:
        """Trials whose lease ran out, and those of workers of this machine that are no more."""
        with self._database.session() as session:
            trials = TrialRepository(session)
            trials.reap()
            live = trials.live_attempts()
        for attempt in live:
            if attempt.worker != self.name and is_dead(attempt.worker):
                with self._database.session() as session:
                    reason = f"its worker {attempt.worker} has ended"
                    TrialRepository(session).abandon(attempt.claim_id, reason)

    def _active(self) -> bool:
        assert self._sweep_id is not None
        with self._database.reading() as session:
            sweep = SweepRepository(session).get(self._sweep_id)
        if sweep.state in ("queued", "running") and not self._fits(sweep.ranks, sweep.device):
            raise RuleError(
                rule=f"a sweep's target must fit the machine that runs it ({sweep.device})",
                value=f"{sweep.ranks} ranks",
                remedy=f"This machine has room for {self._made().max_ranks(sweep.device)}.",
            )
        return sweep.state in ("queued", "running")

    def _made(self) -> Executor:
        if self._executor is None:
            self._executor = self._factory()
        return self._executor

    def _tell(self, sweep_id: str, claim: Claim | None, phase: dict[str, object] | None) -> None:
        if self._progress is None:
            return
        from tuner.sweep import progress_of

        try:
            now = progress_of(self._database, sweep_id)
        except DatabaseUnreachable:  # a trial that runs is not given up because nobody can be told
            return
        self._progress(replace(now, phase=phase, running=None if claim is None else claim.trial.config_json))


@cache
def _machine() -> str:
    """This machine, and this process-id namespace of it: elsewhere a process id means somebody else."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()[:8]
        namespace = Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    except OSError:
        return socket.gethostname()
    return f"{socket.gethostname()}.{boot}.{namespace}"


def worker_name() -> str:
    """Machine, process id and the process's start: no other process is ever called so."""
    pid = os.getpid()
    return f"{_machine()}/{pid}/{process_start(pid)}"


def is_dead(worker: str) -> bool:
    """Whether this worker is certainly gone; of other machines' workers one cannot know."""
    machine, _, rest = worker.partition("/")
    pid, _, born = rest.partition("/")
    if machine != _machine() or not pid.isdigit():
        return False
    return process_start(int(pid)) != born
