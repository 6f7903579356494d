"""One claimed trial, from placing to its answer; whatever its ranks do, it ends with a state and a reason."""

from __future__ import annotations

import logging
import math
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import monotonic, sleep
from typing import Any

from cost_model.errors import RuleError
from db.lifecycle import TrialState
from db.repositories import Claim, ClaimLost, SampleRepository, SweepRepository, TrialRepository
from db.repositories.samples import NewSample
from db.session import Database, DatabaseUnreachable
from tuner.executors.base import Executor, GangOutcome, GangTask, NoSite, OutcomeKind, Site
from tuner.machine.fingerprint import commit
from tuner.measuring.environment import environment_of
from tuner.measuring.front import Point, front, slack
from tuner.measuring.measure import MeasureRequest
from tuner.measuring.modes import split_modes
from tuner.registry import OperatorAdapter, load_adapter, reference
from tuner.sweeping.sweep_spec import SweepSpec

_LOG = logging.getLogger("flatpeak.worker")
# What a rank needs beside the tensors that Eq. 6 counts: stacks, buffers of gloo, freed memory not given back.
_HOST_SLACK_BYTES = 512 * 2**20
_STATES: dict[OutcomeKind, TrialState] = {
    "device_oom": TrialState.INFEASIBLE,
    "host_oom": TrialState.INFEASIBLE,
    "invalid": TrialState.INFEASIBLE,
    "cancelled": TrialState.CANCELLED,
}

# These say more of the machines than of the point: the trial goes back to the queue, a few times.
_TRY_AGAIN: tuple[OutcomeKind, ...] = ("died", "start")


@dataclass(frozen=True, slots=True)
class Leases:
    """How long a claim holds without a heartbeat, and how often one is sent, in seconds."""

    lease_s: float = 60.0
    heartbeat_s: float = 10.0

    @classmethod
    def of(cls, lease_s: float) -> Leases:
        return cls(lease_s, lease_s / 6)

    @property
    def silence_s(self) -> float:
        """How long the database may be silent until ranks must stop: they need a moment before the lease is over."""
        return self.lease_s - self.heartbeat_s


@dataclass(frozen=True, slots=True)
class Answer:
    """What :meth:`TrialRepository.finish` stores."""

    state: TrialState
    reason_kind: str | None = None
    reason: str | None = None
    result: dict[str, Any] | None = None
    latency_s: float | None = None
    peak_bytes: int | None = None
    samples: tuple[NewSample, ...] = ()
    log_tail: str | None = None


def memory_limit_bytes(spec: SweepSpec, site: Site) -> int:
    """Eq. 6 cap of one rank: the sweep's own, or the card, or the rank's share of its node's RAM."""
    if spec.memory_limit_bytes is not None:
        return spec.memory_limit_bytes
    return site.rank_bytes(spec.target.device, spec.target.ranks // spec.target.nodes)


def over_limit(bound_bytes: int | None, limit_bytes: int) -> str | None:
    """Why a point cannot be launched, or None when its bound lies within the limit."""
    if bound_bytes is None or bound_bytes <= limit_bytes:
        return None
    return f"its bound of {bound_bytes} bytes a rank exceeds the limit of {limit_bytes} bytes (Eq. 6)"


def run_trial(
    database: Database,
    claim: Claim,
    spec: SweepSpec,
    executor: Executor,
    *,
    leases: Leases | None = None,
    stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
) -> TrialState | None:
    """Measure a claimed trial and store its answer with its samples, in one transaction.

    Whatever is raised on the way, but for a database that is away, is this trial's matter alone: it counts as lost.

    Args:
        stop: the worker is asked to leave: the trial goes back to the queue unharmed.

    Returns:
        The state it ended in; ``queued`` when it was given back (the worker was told to stop, or the cluster had
        no room), ``lost`` when a rank's process died, its gang did not come up or the executor raised; None when the
        claim was lost meanwhile.

    Raises:
        DatabaseUnreachable: for a whole lease; the trial comes back to the queue when that has run out.
    """
    leases = leases or Leases()
    try:
        return _run(database, claim, spec, executor, leases=leases, stop=stop, on_progress=on_progress)
    except ClaimLost:
        return None
    except DatabaseUnreachable:
        raise
    except Exception as error:
        raised = GangOutcome("raised", reason=_said(error), log_tail=traceback.format_exc())
        _persist(leases, lambda: _retry(database, claim, raised))
        return TrialState.LOST


def _run(
    database: Database,
    claim: Claim,
    spec: SweepSpec,
    executor: Executor,
    *,
    leases: Leases,
    stop: Callable[[], bool],
    on_progress: Callable[[dict[str, Any]], None] | None,
) -> TrialState:
    outcome = GangOutcome("done")
    try:
        site = executor.site(spec.target.device, spec.target.nodes, spec.target.hardware_id)
    except NoSite as error:
        nowhere = str(error)
        _persist(leases, lambda: _give_back(database, claim, nowhere))
        return TrialState.QUEUED
    limit = memory_limit_bytes(spec, site)
    if spec.target.hardware_id not in (None, site.hardware_id):
        elsewhere = f"its sweep is bound to {spec.target.hardware_id}, here is {site.hardware_id}"
        answer = Answer(TrialState.FAILED, "invalid", elsewhere)
    elif (reason := over_limit(claim.trial.bound_bytes, limit)) is not None:
        answer = Answer(TrialState.INFEASIBLE, "bound", reason)
    else:
        outcome, by_user = _launch(
            database,
            claim,
            spec,
            executor,
            site,
            leases=leases,
            limit_bytes=limit,
            stop=stop,
            on_progress=on_progress,
        )
        if outcome.kind == "unplaced" or (outcome.kind == "cancelled" and not by_user):
            told = "the worker was told to stop" if outcome.kind == "cancelled" else outcome.reason
            _persist(leases, lambda: _give_back(database, claim, told))
            return TrialState.QUEUED
        if outcome.kind in _TRY_AGAIN:
            _persist(leases, lambda: _retry(database, claim, outcome))
            return TrialState.LOST
        try:
            answer = _answer(outcome, spec, limit)
        except Exception as error:  # an operator of one's own may answer anything
            answer = _unusable(error, outcome)
    try:
        _persist(leases, lambda: _store(database, claim, spec, site, answer))
    except (ClaimLost, DatabaseUnreachable):
        raise
    except Exception as error:  # figures that no database takes
        if not answer.samples:
            raise
        answer = _unusable(error, outcome)
        _persist(leases, lambda: _store(database, claim, spec, site, answer))
    return answer.state


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _unusable(error: Exception, outcome: GangOutcome) -> Answer:
    reason = f"its ranks' answers cannot be used: {_said(error)}"
    return Answer(TrialState.FAILED, "raised", reason, log_tail=outcome.log_tail or None)


def _launch(
    database: Database,
    claim: Claim,
    spec: SweepSpec,
    executor: Executor,
    site: Site,
    *,
    leases: Leases,
    limit_bytes: int,
    stop: Callable[[], bool],
    on_progress: Callable[[dict[str, Any]], None] | None,
) -> tuple[GangOutcome, bool]:
    """The outcome, and whether the user asked for a cancellation (not ``stop``, nor a lost claim)."""
    with database.session() as session:
        heard = monotonic()
        TrialRepository(session).start(
            claim,
            hardware_id=site.hardware_id,
            software=site.software,
            lease_s=leases.lease_s,
        )
    known, spread = _known_front(database, claim.trial.sweep_id) if spec.prunes else ([], slack(()))
    request = MeasureRequest(
        adapter=reference(spec.operator),
        provider=spec.provider,
        shape=spec.shape,
        config=claim.trial.config_json,
        device=spec.target.device,
        repeats=spec.repeats,
        front=known,
        slack=spread,
        loopback=spec.target.loopback,
    )
    task = GangTask(
        function="tuner.measuring.measure:measure_rank",
        payload=request.payload(),
        ranks=spec.target.ranks,
        device=spec.target.device,
        nodes=spec.target.nodes,
        timers=spec.timers.timers(),
        host_limit_bytes=limit_bytes + _HOST_SLACK_BYTES if spec.target.device == "cpu" else None,
        hardware_id=site.hardware_id,  # the samples are stored under it
    )

    def hear(rank: int, progress: dict[str, Any]) -> None:
        if rank == 0 and on_progress is not None:
            on_progress(progress)

    with Heart(database, claim.claim_id, leases, heard) as heart:
        outcome = executor.run(task, on_progress=hear, cancelled=lambda: heart.must_stop or stop())
    return outcome, heart.cancelled


def _known_front(database: Database, sweep_id: str) -> tuple[list[Point], float]:
    """Front of the sweep's measured trials, and how far one of their repeats lay above its fast mode."""
    with database.reading() as session:
        trials = TrialRepository(session).of_sweep(sweep_id, state=TrialState.SUCCEEDED.value)
    points = [(t.peak_bytes, t.latency_s) for t in trials if t.peak_bytes is not None and t.latency_s]
    return front(points), slack((t.result_json or {}).get("slowest_over_fast", 1.0) for t in trials)


class Heart:
    """Extends the lease from the supervisor while the ranks work, and hears when they must stop.

    Args:
        heard: ``monotonic()`` when the lease began.
    """

    def __init__(self, database: Database, claim_id: str, leases: Leases, heard: float) -> None:
        self._database, self._claim_id, self._leases = database, claim_id, leases
        self._heard = heard
        self._done = threading.Event()
        self._stop = threading.Event()
        self.cancelled = False
        self._thread = threading.Thread(target=self._beat, daemon=True, name="heartbeat")

    @property
    def must_stop(self) -> bool:
        """The user cancelled, or the claim is gone, or the lease is almost over and the database silent.

        Asked, not told: a heartbeat may wait for a lock longer than the lease lasts.
        """
        return self._stop.is_set() or monotonic() - self._heard > self._leases.silence_s

    def __enter__(self) -> Heart:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._done.wait(self._leases.heartbeat_s):
            try:
                with self._database.session() as session:
                    heard = monotonic()  # now, not before: that may have been a long wait for others' writes
                    beat = TrialRepository(session).heartbeat(self._claim_id, lease_s=self._leases.lease_s)
            except Exception as error:  # it may pass before the lease runs out; else must_stop says so
                _LOG.warning("a heartbeat of %s failed: %s", self._claim_id, error)
                continue
            self._heard = heard
            self.cancelled = beat.alive and beat.cancel
            if beat.cancel or not beat.alive:
                self._stop.set()


def _answer(outcome: GangOutcome, spec: SweepSpec, limit_bytes: int) -> Answer:
    if not outcome.ok:
        state = _STATES.get(outcome.kind, TrialState.FAILED)
        return Answer(state, outcome.kind, outcome.reason, log_tail=outcome.log_tail)
    measured = outcome.results
    samples = tuple(
        NewSample(name, rank, repeat, seconds, allocated, reserved, one["peak_source"])
        for rank, one in enumerate(measured)
        for name, repeat, seconds, allocated, reserved in one["samples"]
    )
    _check_figures(samples, measured)
    error = max((one["error"] for one in measured if one["error"] is not None), default=None)
    tolerance = min(one["tolerance"] for one in measured)
    wrong = error is None or not error <= tolerance or any(one["error"] is None for one in measured)
    peak = max(s.allocated_bytes or 0 for s in samples)
    repeats = 1 + max(s.repeat for s in samples)  # fewer than asked for when it was pruned
    totals = _totals(samples, repeats)
    modes = split_modes(totals)
    reserved = [s.reserved_bytes for s in samples if s.reserved_bytes is not None]
    used = [one["device_used_bytes"] for one in measured if one["device_used_bytes"] is not None]
    environment, flags = environment_of(measured)
    result = {
        "fast_s": modes.fast_s,
        "slow_s": modes.slow_s,
        "slow_share": modes.slow_share,
        "passes": {name: split_modes(_totals(samples, repeats, name)).fast_s for name in _passes(samples)},
        "slowest_over_fast": max(totals) / modes.fast_s,
        "noise": modes.noise,
        "peak_allocated_bytes": peak,
        "peak_reserved_bytes": max(reserved, default=None),
        "device_used_bytes": max(used, default=None),
        "base_bytes": max(one["base_bytes"] for one in measured),
        "library_bytes": max(one["library_bytes"] for one in measured),
        "host_locked_bytes": max(one["host_locked_bytes"] for one in measured),
        "peak_source": measured[0]["peak_source"],
        "warmups": max(one["warmups"] for one in measured),
        "error": error,
        "tolerance": tolerance,
        "environment": environment,
        "flags": [asdict(flag) for flag in flags],
    }
    state, kind, reason = TrialState.SUCCEEDED, None, None
    if wrong:
        state, kind = TrialState.FAILED, "wrong"
        reason = f"its results differ from the reference by {error}, more than {tolerance:g}"
    elif spec.memory_limit_bytes is not None and peak > limit_bytes:
        state, kind = TrialState.INFEASIBLE, "peak"
        reason = f"its measured peak of {peak} bytes exceeds the limit of {limit_bytes} bytes"
    elif (better := measured[0]["pruned"]) is not None:
        state, kind = TrialState.PRUNED, "pruned"
        reason = (
            f"its first repeat of {totals[0]:.4g} s puts the front out of reach: "
            f"{better[1]:.4g} s are known at a peak of {better[0]} bytes"
        )
    return Answer(
        state,
        kind,
        reason,
        result=result,
        latency_s=None if wrong else modes.fast_s,
        peak_bytes=peak,
        samples=samples,
        log_tail=outcome.log_tail or None,
    )


def _check_figures(samples: tuple[NewSample, ...], measured: list[dict[str, Any]]) -> None:
    """Raises RuleError for what cannot have been measured: no pass, no time, no number."""
    if not samples:
        raise RuleError(
            rule="a measurement times at least one pass",
            value=[],
            remedy="Give the adapter's Runnable passes.",
        )
    for name, value in [
        *((f"seconds of {s.pass_}", s.seconds) for s in samples),
        *(("tolerance", one["tolerance"]) for one in measured),
    ]:
        if not (math.isfinite(value) and (value > 0 or (value == 0 and name == "tolerance"))):
            raise RuleError(
                rule=f"{name} must be a positive number",
                value=value,
                remedy="Correct the operator's adapter.",
            )


def _passes(samples: tuple[NewSample, ...]) -> list[str]:
    return list(dict.fromkeys(s.pass_ for s in samples))


def _totals(samples: tuple[NewSample, ...], repeats: int, name: str | None = None) -> list[float]:
    """Seconds of each repeat: the slowest rank of each pass, passes added."""
    slowest: dict[tuple[int, str], float] = {}
    for s in samples:
        if name is None or s.pass_ == name:
            key = (s.repeat, s.pass_)
            slowest[key] = max(slowest.get(key, 0.0), s.seconds)
    return [sum(t for (r, _), t in slowest.items() if r == repeat) for repeat in range(repeats)]


def _store(database: Database, claim: Claim, spec: SweepSpec, site: Site, answer: Answer) -> None:
    adapter: OperatorAdapter = load_adapter(spec.operator)
    with database.session() as session:
        TrialRepository(session).finish(
            claim,
            answer.state,
            reason_kind=answer.reason_kind,
            reason=answer.reason,
            result=answer.result,
            latency_s=answer.latency_s,
            peak_bytes=answer.peak_bytes,
            log_tail=answer.log_tail,
        )
        SampleRepository(session).add(
            claim,
            answer.samples,
            operator=adapter.name,
            provider=spec.provider,
            shape=spec.group_shape,
            ranks=spec.target.ranks,
            hardware_id=site.hardware_id,
            operator_version=adapter.version,
            commit=commit(),
        )


def _give_back(database: Database, claim: Claim, reason: str) -> None:
    with database.session() as session:
        TrialRepository(session).release(claim, reason)


def _retry(database: Database, claim: Claim, outcome: GangOutcome) -> None:
    """Count the trial as lost; it is failed for this reason when that happens too often."""
    with database.session() as session:
        TrialRepository(session).abandon(
            claim.claim_id, outcome.reason, reason_kind=outcome.kind, log_tail=outcome.log_tail or None
        )


def _persist(leases: Leases, write: Callable[[], None]) -> None:
    """Write, and try again for one lease when the database is away: an answer is not thrown away lightly."""
    until = monotonic() + leases.lease_s
    while True:
        try:
            write()
        except DatabaseUnreachable:
            if monotonic() > until:
                raise
            sleep(min(1.0, leases.heartbeat_s))
        else:
            return


def failures_pause(database: Database, sweep_id: str, *, most: int = 3, window_s: float = 60.0) -> bool:
    """Pause the sweep when so many trials failed, not by lack of memory, within the window."""
    with database.session() as session:
        sweeps = SweepRepository(session)
        reasons = sweeps.recent_failures(sweep_id, window_s)
        if len(reasons) < most:
            return False
        last = reasons[-1].strip().splitlines()[-1] if reasons[-1].strip() else "no reason given"
        return sweeps.pause(sweep_id, f"{len(reasons)} trials failed within {window_s:g} s; the last: {last}")
