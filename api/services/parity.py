"""Where a cost model is right and where it is wrong: predictions beside what was measured."""

from __future__ import annotations

import warnings

from sqlalchemy.orm import Session

from api.schemas.catalog import ParityPoint
from api.services.planning import ONE_AT_A_TIME, stored_cost_model
from cost_model.calibration import predict
from cost_model.coverage import OutsideMeasured
from cost_model.errors import RuleError
from cost_model.rates import CostModel
from cost_model.sample_formulas import FITTED
from cost_model.samples import Observation, observations
from db.repositories import SampleRepository
from tuner.routing.rows import with_routing
from tuner.rows.current_rows import current_rows

MOST_POINTS = 2000


def parity(session: Session, cost_model_id: str) -> list[ParityPoint]:
    """One point a configuration and pass, at most ``MOST_POINTS``; what the model refuses is left out.

    Raises:
        NotFound: there is no such cost model.
    """
    cost = stored_cost_model(session, cost_model_id)
    samples = current_rows(SampleRepository(session).frame(hardware_id=cost.hardware_id))
    if samples.empty:
        return []
    rows, _ = observations(with_routing(samples), cost.hardware_id)
    known = [row for row in rows if row.operator in FITTED][:MOST_POINTS]
    with ONE_AT_A_TIME, warnings.catch_warnings():
        # A point outside the model's own region says so by its wide interval.
        warnings.simplefilter("ignore", OutsideMeasured)
        points = [_point(cost, row) for row in known]
    return [point for point in points if point is not None]


def _point(cost: CostModel, row: Observation) -> ParityPoint | None:
    try:
        estimate = predict(cost, row.operator, row.values, row.pass_name)
    except RuleError:
        return None
    return ParityPoint.model_validate(
        {
            "operator": row.operator,
            "pass": row.pass_name,
            "config": row.values,
            "measured_s": row.seconds,
            "predicted_s": estimate.value,
            "low_s": estimate.low,
            "high_s": estimate.high,
            "provenance": estimate.provenance,
        }
    )
