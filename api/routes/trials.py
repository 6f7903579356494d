"""/v1/trials: one configuration, its attempts, its samples."""

from __future__ import annotations

from fastapi import APIRouter, Depends

from api.auth import reads
from api.routes.context import Store, problems
from api.schemas.sweeps import TrialDetail
from api.services import sweeps as service

router = APIRouter(prefix="/v1/trials", tags=["sweeps"])


@router.get("/{trial_id}", dependencies=[Depends(reads)], responses=problems(404))
def get_trial(store: Store, trial_id: str) -> TrialDetail:
    """One trial with everything that was tried and measured."""
    with store.reading() as session:
        return service.get_trial(session, trial_id)
