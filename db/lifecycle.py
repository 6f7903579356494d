"""The states of a trial and of a sweep, and the one table of moves between them."""

from __future__ import annotations

from enum import StrEnum


class TrialState(StrEnum):
    """Where a trial stands.

    ``infeasible`` is a result, with a reason (bound, device OOM, host OOM, invalid), and is never retried.
    ``lost`` is passed through when the worker of an attempt is gone: the trial returns to ``queued``, or
    becomes ``failed`` once it was lost :data:`MAX_LOSSES` times.
    """

    QUEUED = "queued"
    PLACING = "placing"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    INFEASIBLE = "infeasible"
    FAILED = "failed"
    PRUNED = "pruned"
    CANCELLED = "cancelled"
    LOST = "lost"


class SweepState(StrEnum):
    """Where a sweep stands. ``paused`` says why in the sweep's ``reason`` and can be resumed."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


_S = TrialState
_ENDS = frozenset({_S.SUCCEEDED, _S.INFEASIBLE, _S.FAILED, _S.PRUNED, _S.CANCELLED})

MAX_LOSSES = 3
"""How often a lost trial goes back to the queue."""

MOVES: dict[TrialState, frozenset[TrialState]] = {
    # a bound over the memory limit ends a trial before anybody claims it
    _S.QUEUED: frozenset({_S.PLACING, _S.INFEASIBLE, _S.PRUNED, _S.CANCELLED}),
    _S.PLACING: frozenset({_S.RUNNING, _S.INFEASIBLE, _S.FAILED, _S.CANCELLED, _S.LOST}),
    _S.RUNNING: _ENDS | {_S.LOST},
    _S.LOST: frozenset({_S.QUEUED, _S.FAILED, _S.CANCELLED}),
    **{end: frozenset() for end in _ENDS},
}

TERMINAL = _ENDS
"""States that never change again."""

LIVE = frozenset({_S.PLACING, _S.RUNNING})
"""States in which exactly one attempt holds the trial."""

SWEEP_TERMINAL = frozenset({SweepState.SUCCEEDED, SweepState.FAILED, SweepState.CANCELLED})


def sources(target: TrialState) -> frozenset[TrialState]:
    """States from which ``target`` may be entered: the guard of every compare-and-set."""
    return frozenset(state for state, targets in MOVES.items() if target in targets)
