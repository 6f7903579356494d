"""Strategy ``model`` inside a sweep: the problem and what was seen of it, from the database's rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd

from cost_model.rates import CostModel
from cost_model.samples import Observation, observations
from db.lifecycle import TERMINAL, TrialState
from db.repositories import CostModelRepository, SampleRepository
from db.session import Database
from db.tables import Trial
from tuner.executors.base import OOM_KINDS
from tuner.proposals.model import Candidate, Problem, Seen, Suggestion, suggest
from tuner.proposals.peak import Needed
from tuner.proposals.prior import MOST_WARM, nearest, prior_for, shipped_rows
from tuner.registry import OperatorAdapter
from tuner.routing.rows import with_routing
from tuner.space import Space
from tuner.sweeping.sweep_spec import SweepSpec


def suggest_next(
    database: Database,
    sweep_id: str,
    spec: SweepSpec,
    adapter: OperatorAdapter,
    space: Space,
    *,
    candidates: Iterable[Candidate],
    trials: Sequence[Trial],
    hardware_id: str,
    limit_bytes: int,
) -> Suggestion | None:
    """The next point of a sweep, or None when none is worth a launch.

    It starts from the cost model in force for the hardware (else what ships) and from older rows of the same
    fingerprint and version of the operator, those of the same shape first; flagged trials count
    only where there are no others.
    """
    prior, warm = _older(database, sweep_id, spec, adapter, hardware_id)
    problem = Problem.of(
        adapter.name,
        spec.provider,
        shape=spec.group_shape,
        ranks=spec.target.group_size,
        space=space,
        candidates=candidates,
        prior=prior,
        warm=warm,
    )
    return suggest(
        problem,
        [seen for trial in trials if (seen := _seen(trial)) is not None],
        taken=[t.config_json for t in trials if TrialState(t.state) in TERMINAL],
        limit_bytes=limit_bytes,
        needed=[needed for trial in trials if (needed := _needed(trial)) is not None],
        running=[t.config_json for t in trials if TrialState(t.state) not in TERMINAL],
        seed=spec.seed,
    )


def _older(
    database: Database, sweep_id: str, spec: SweepSpec, adapter: OperatorAdapter, hardware_id: str
) -> tuple[CostModel, list[Observation]]:
    with database.reading() as session:
        row = CostModelRepository(session).current(hardware_id)
        prior = (
            prior_for(hardware_id, spec.target.nodes) if row is None else CostModel.from_json(row.model_json)
        )
        rows = SampleRepository(session).frame(operator=adapter.name, hardware_id=hardware_id)
        flagged = SampleRepository(session).flagged_trials()
    rows = rows[rows["sweep_id"] != sweep_id]
    in_doubt = rows["trial_id"].isin(flagged)
    rows = rows if in_doubt.all() else rows[~in_doubt]  # they steer only: doubtful rows are better than none
    rows = rows[rows["operator_version"] == adapter.version]
    shipped = shipped_rows(adapter.name, adapter.version, hardware_id)
    frames = [frame for frame in (shipped, rows) if not frame.empty]
    if not frames:
        return prior, []
    found, _ = observations(with_routing(pd.concat(frames, ignore_index=True)), hardware_id)
    shape = {**spec.group_shape, "ranks": spec.target.group_size}
    return prior, nearest(found, shape)[:MOST_WARM]


def _needed(trial: Trial) -> Needed | None:
    """Memory of a trial that was launched, as far as it showed any."""
    if trial.reason_kind in OOM_KINDS:
        return Needed(trial.config_json, trial.bound_bytes, None)
    if trial.peak_bytes is None:
        return None
    return Needed(trial.config_json, trial.bound_bytes, trial.peak_bytes)


def _seen(trial: Trial) -> Seen | None:
    """A trial that was timed, wholly or until it was pruned."""
    state = TrialState(trial.state)
    result = trial.result_json
    if state not in TERMINAL or trial.latency_s is None or result is None or trial.reason_kind == "peak":
        return None
    return Seen(
        trial.config_json,
        {str(name): float(seconds) for name, seconds in result["passes"].items()},
        noise=float(result.get("noise", 0.0)),
        pruned=state is TrialState.PRUNED,
    )
