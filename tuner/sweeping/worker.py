"""A worker: claims trials, runs them, reaps what others left; leaves cleanly when told to."""

from __future__ import annotations

import logging
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
from db.tables import Sweep
from tuner.executors.base import Executor, NoSite
from tuner.machine.process_start import process_start
from tuner.registry import load_adapter
from tuner.sweeping.misfit import misfit
from tuner.sweeping.sweep_spec import SweepSpec
from tuner.sweeping.trial import Leases, failures_pause, run_trial

if TYPE_CHECKING:
    from tuner.sweeping.sweep import SweepProgress

_LOG = logging.getLogger("flatpeak.worker")
_IDLE_S = 1.0
_IDLE_STEP_S = 0.1
# A sweep whose gang finds no room is tried again after this, each time twice as long; meanwhile others are worked on.
_NO_ROOM_S = 2.0
_NO_ROOM_MOST_S = 60.0
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
        self._specs: dict[str, SweepSpec] = {}
        self._unread: set[str] = set()
        self._no_room: dict[str, tuple[float, float]] = {}  # pause, and when it is over
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

    def may_work(self) -> bool:
        """Whether a sweep is left that this machine can run."""
        return bool(self._able())

    def _step(self, stop: Callable[[], bool]) -> bool:
        """Do one trial, or end what has no more; whether there was anything to do."""
        self._take_back()
        now = monotonic()
        able = {
            one: spec for one, spec in self._able().items() if self._no_room.get(one, (0.0, now))[1] <= now
        }
        claim = self._claim(able)
        if claim is None:
            return self._extend_or_settle(able)
        sweep_id = claim.trial.sweep_id
        with self._database.session() as session:
            SweepRepository(session).mark_running(sweep_id)
        self._tell(sweep_id, claim, {"phase": "placing"})
        state = run_trial(
            self._database,
            claim,
            able[sweep_id],
            self._made(),
            leases=self._leases,
            stop=stop,
            on_progress=lambda phase: self._tell(sweep_id, claim, phase),
        )
        if state in (TrialState.FAILED, TrialState.LOST):
            failures_pause(self._database, sweep_id)
        self._tell(sweep_id, None, None)
        if state is TrialState.QUEUED:  # given back: there is no room for it at this moment
            longer = 2 * self._no_room.get(sweep_id, (_NO_ROOM_S / 2, 0.0))[0]
            pause = min(longer, _NO_ROOM_MOST_S)
            self._no_room[sweep_id] = (pause, monotonic() + pause)
        else:
            self._no_room.pop(sweep_id, None)
        return True

    def _able(self) -> dict[str, SweepSpec]:
        """Sweeps that may have work and that this machine can run, oldest first."""
        with self._database.reading() as session:
            active = SweepRepository(session).active()
        able = {}
        for sweep in active:
            if self._sweep_id not in (None, sweep.id):
                continue
            spec = self._read(sweep)
            if spec is not None and misfit(self._made(), spec.target) is None:
                able[sweep.id] = spec
        return able

    def _read(self, sweep: Sweep) -> SweepSpec | None:
        """The spec of a sweep whose operator can be loaded here; None where this worker cannot read it."""
        from tuner.sweeping.sweep import spec_of

        if sweep.id in self._unread:
            return None
        if (known := self._specs.get(sweep.id)) is not None:
            return known
        try:
            spec = spec_of(sweep)
            load_adapter(spec.operator)
        except Exception as error:  # an adapter of one's own may raise anything
            self._leave(sweep.id, error)
            return None
        self._specs[sweep.id] = spec
        return spec

    def _leave(self, sweep_id: str, error: Exception) -> None:
        """Leave a sweep that cannot be worked on here to others, and say so once.

        Raises:
            RuleError: it is the only sweep of this worker.
        """
        said = " ".join(str(error).split()) or type(error).__name__
        if sweep_id == self._sweep_id:
            if isinstance(error, RuleError):
                raise error
            raise RuleError(
                rule="a sweep's spec and operator must be readable here",
                value=sweep_id,
                remedy=f"Run it where its release of flatpeak and its operator are installed: {said}",
            ) from error
        _LOG.warning("sweep %s is left to other workers: %s", sweep_id, said)
        self._unread.add(sweep_id)
        self._tell(sweep_id, None, {"phase": "skipped", "reason": said})

    def _extend_or_settle(self, able: dict[str, SweepSpec]) -> bool:
        from tuner.sweeping.sweep import Extension, extend_sweep

        moved = False
        for sweep_id, spec in able.items():
            try:
                target = spec.target
                site = self._made().site(target.device, target.nodes, target.hardware_id)
                found = extend_sweep(self._database, sweep_id, site)
            except NoSite:  # its nodes have gone this moment
                continue
            except DatabaseUnreachable:
                raise
            except Exception as error:  # what its operator or its strategy raises is no other sweep's matter
                self._leave(sweep_id, error)
                continue
            with self._database.session() as session:
                trials = TrialRepository(session).of_sweep(sweep_id, state=TrialState.QUEUED.value)
                before = SweepRepository(session).get(sweep_id).state
                state = SweepRepository(session).settle(sweep_id, complete=found is Extension.COMPLETE)
            moved |= bool(trials) or found is Extension.ADDED
            if state.value != before:
                self._tell(sweep_id, None, None)
        return moved

    def _claim(self, able: dict[str, SweepSpec]) -> Claim | None:
        if not able:
            return None
        with self._database.session() as session:
            return TrialRepository(session).claim(
                self.name, lease_s=self._leases.lease_s, sweep_ids=list(able)
            )

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
        """Whether the one sweep may go on here.

        Raises:
            RuleError: it may, but not here.
        """
        assert self._sweep_id is not None
        with self._database.reading() as session:
            sweep = SweepRepository(session).get(self._sweep_id)
        if sweep.state not in ("queued", "running"):
            return False
        spec = self._read(sweep)
        if spec is not None and (found := misfit(self._made(), spec.target)) is not None:
            raise found
        return True

    def _made(self) -> Executor:
        if self._executor is None:
            self._executor = self._factory()
        return self._executor

    def _tell(self, sweep_id: str, claim: Claim | None, phase: dict[str, object] | None) -> None:
        if self._progress is None:
            return
        from tuner.sweeping.sweep import progress_of

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
