"""Attempts of a sweep: who worked on which trial, and when."""

from __future__ import annotations

from pydantic import BaseModel, Field


class AttemptSpan(BaseModel):
    """One try at a trial, as a stretch of a worker's time."""

    id: str
    trial_id: str
    trial_number: int
    worker: str
    claimed_at: str | None
    started_at: str | None = Field(description="When its ranks were there; null where they never came")
    finished_at: str | None = Field(description="null while it runs")
    outcome: str | None = Field(description="The state it ended in; `lost` when its worker went away")
