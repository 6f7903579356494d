"""One plan: the request's specs and cost model go to the planner, its answer comes back as stored JSON."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from api.errors import NotFound
from api.schemas.common import Page, decode_cursor, encode_cursor, timestamp
from api.schemas.plans import PlanRequest, PlanSummary
from api.services.specs import cluster_of, model_of, read_mapping
from cost_model.cluster_spec import ClusterSpec
from cost_model.coverage import OutsideMeasured
from cost_model.memory import Mode
from cost_model.model_spec import ModelSpec
from cost_model.rates import CostModel
from cost_model.rates_default import default_cost_model
from cost_model.workload import Workload
from db.repositories import CostModelRepository, PlanRepository, SampleRepository
from db.tables import CostModelRow, Plan
from tuner.exporters.launch_file import export_launch
from tuner.planning.plan import PlanOptions
from tuner.planning.planner import make_plan, with_measured
from tuner.rows.measured import MeasuredFronts

EXPORT_FORMATS = ("launch",)
ONE_AT_A_TIME = threading.Lock()


def stored_cost_model(session: Session, cost_model_id: str) -> CostModel:
    """A stored cost model by its id.

    Raises:
        NotFound: there is none.
    """
    row = CostModelRepository(session).find(cost_model_id)
    if row is None:
        raise NotFound("cost model", cost_model_id)
    return cost_model_of(row)


def cost_model_of(row: CostModelRow) -> CostModel:
    """The cost model in a row, under the row's id."""
    return dataclasses.replace(CostModel.from_json(row.model_json), id=row.id)


def best_cost_model(session: Session | None, cluster: ClusterSpec) -> CostModel:
    """The promoted cost model of exactly this hardware; else what ships, which says so by its provenance."""
    row = CostModelRepository(session).current(cluster.hardware_id) if session is not None else None
    return default_cost_model(cluster) if row is None else cost_model_of(row)


def cost_model_from_file(path: Path) -> CostModel:
    """A cost model saved as JSON.

    Raises:
        RuleError: the file cannot be read as one.
    """
    return CostModel.from_json(read_mapping(path, "a cost model file"))


@dataclasses.dataclass(frozen=True, slots=True)
class PlanInputs:
    """What a plan is made of: the request's specs, the rates, and what sweeps measured on this hardware."""

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    cost: CostModel
    mode: Mode = "expected"
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    measured: MeasuredFronts | None = None


def measured_points(session: Session, cluster: ClusterSpec) -> MeasuredFronts:
    """Sweep rows of exactly this hardware: where a shape was measured, they stand in for the model.

    Rows of flagged trials do not, and the plan says so: their times may be those of another's work.
    """
    repository = SampleRepository(session)
    samples = repository.frame(hardware_id=cluster.hardware_id)
    doubted = samples["trial_id"].isin(repository.flagged_trials())
    flagged = int(samples.loc[doubted, "trial_id"].nunique())
    return dataclasses.replace(with_measured(samples[~doubted], cluster), flagged=flagged)


def compute_plan(inputs: PlanInputs) -> dict[str, Any]:
    """The plan as one JSON object: what ``flatpeak plan --json`` prints.

    One at a time: planning is one core's work, and the warnings filter belongs to the whole process.
    """
    with ONE_AT_A_TIME, warnings.catch_warnings():
        # What lies outside the measured region is said in the plan itself.
        warnings.simplefilter("ignore", OutsideMeasured)
        options = PlanOptions(mode=inputs.mode, fixed=inputs.fixed, measured=inputs.measured)
        return make_plan(inputs.model, inputs.cluster, inputs.workload, inputs.cost, options).to_json()


def inputs_of(session: Session, request: PlanRequest) -> PlanInputs:
    """Specs, cost model, pins and measured points of a request.

    Raises:
        NotFound: a stored id is unknown.
        RuleError: a spec is not usable.
    """
    model = model_of(request.model, session)
    cluster = cluster_of(request.cluster, session)
    workload = Workload(**request.workload.model_dump())
    wanted = request.options.cost_model_id
    cost = stored_cost_model(session, wanted) if wanted else best_cost_model(session, cluster)
    return PlanInputs(
        model,
        cluster,
        workload,
        cost,
        mode=request.options.mode,
        fixed=request.options.fixed.given(),
        measured=measured_points(session, cluster),
    )


def save_plan(session: Session, plan: dict[str, Any]) -> dict[str, Any]:
    """Store a plan; returns it with ``id`` and ``created_at``."""
    row = PlanRepository(session).add(plan, verdict=plan["verdict"], cost_model_id=plan.get("cost_model_id"))
    return plan_view(row)


def plan_view(row: Plan) -> dict[str, Any]:
    """A stored plan with its id and time."""
    return {"id": row.id, "created_at": timestamp(row.created_at), **row.plan_json}


def get_plan(session: Session, plan_id: str) -> dict[str, Any]:
    """A stored plan.

    Raises:
        NotFound: there is none.
    """
    row = PlanRepository(session).find(plan_id)
    if row is None:
        raise NotFound("plan", plan_id)
    return plan_view(row)


def list_plans(session: Session, *, cursor: str | None, limit: int) -> Page[PlanSummary]:
    """A page of plans, newest first."""
    page = PlanRepository(session).page(cursor=decode_cursor(cursor), limit=limit)
    return Page(
        items=[_summary(row) for row in page.items],
        next_cursor=encode_cursor(page.next_cursor) if page.next_cursor else None,
    )


def export_plan(plan: dict[str, Any]) -> dict[str, Any]:
    """The ``launch.json`` of a plan."""
    return export_launch(plan)


def _summary(row: Plan) -> PlanSummary:
    plan = row.plan_json
    workload, memory = plan.get("workload") or {}, plan.get("memory") or {}
    return PlanSummary(
        id=row.id,
        created_at=timestamp(row.created_at) or "",
        verdict=row.verdict,
        mode=plan["mode"],
        model=_name(plan.get("model")),
        cluster=_cluster_name(plan.get("cluster")),
        context_tokens=workload.get("context_tokens"),
        global_batch_tokens=workload.get("global_batch_tokens"),
        total_s=(plan.get("step_time") or {}).get("total_s"),
        footprint_bytes=memory.get("footprint_bytes"),
        hbm_bytes=memory.get("hbm_bytes"),
        cost_model_id=row.cost_model_id,
    )


def _name(value: object) -> str:
    return str(value.get("name", "")) if isinstance(value, dict) else str(value or "")


def _cluster_name(value: object) -> str:
    if isinstance(value, dict) and "nodes" in value:
        return f"{value.get('nodes')} × {value.get('name', '')}"
    return _name(value)
