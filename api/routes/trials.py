"""/v1/trials: one configuration, its attempts, its samples."""

from __future__ import annotations

from fastapi import APIRouter, Response

from api.etags import Conditional
from api.routes.context import Store, get_resource
from api.schemas.sweeps import TrialDetail
from api.services import sweeps as service

router = APIRouter(prefix="/v1/trials", tags=["sweeps"])


@get_resource(router, "/{trial_id}", TrialDetail)
def get_trial(store: Store, trial_id: str, conditions: Conditional) -> Response:
    """One trial with everything that was tried and measured."""
    with store.reading() as session:
        return conditions.answer(service.get_trial(session, trial_id))
