"""Every query of flatpeak. A repository works inside the caller's session; the session commits."""

from db.repositories.cost_models import CostModelRepository
from db.repositories.events import EventRepository
from db.repositories.idempotency import IdempotencyRepository
from db.repositories.paging import Page
from db.repositories.plans import PlanRepository
from db.repositories.samples import SampleRepository
from db.repositories.specs import ClusterRepository, ModelRepository
from db.repositories.sweeps import SweepRepository
from db.repositories.tokens import TokenRepository
from db.repositories.trials import Beat, Claim, ClaimLost, NewTrial, TrialRepository

__all__ = [
    "Beat",
    "Claim",
    "ClaimLost",
    "ClusterRepository",
    "CostModelRepository",
    "EventRepository",
    "IdempotencyRepository",
    "ModelRepository",
    "NewTrial",
    "Page",
    "PlanRepository",
    "SampleRepository",
    "SweepRepository",
    "TokenRepository",
    "TrialRepository",
]
