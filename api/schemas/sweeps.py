"""Bodies of /v1/sweeps and /v1/trials."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from api.schemas.common import Body

OperatorName = Literal["pipelined_llep", "ring_dtp", "checkpoint_offload", "stream_adamw"]
KnobValue = bool | int | float | str
MAX_TRIALS = 10_000
MAX_POINTS = 100_000


class SweepTarget(Body):
    """Where the sweep runs: any machine with the device, or one kind of hardware only."""

    ranks: Annotated[int, Field(ge=1, le=4096)]
    device: Literal["cpu", "cuda"] = "cpu"
    hardware_id: Annotated[str, Field(max_length=128)] | None = None


class SweepRequest(Body):
    """A sweep file as JSON."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "operator": "ring_dtp",
                    "target": {"ranks": 4, "device": "cpu"},
                    "shape": {"tokens_per_rank": 1024, "hidden": 128, "vocab": 4096, "dtype": "float32"},
                    "space": {"ring_mode": ["activations", "weights"], "strip_rows": [256, 1024]},
                    "strategy": "grid",
                    "repeats": 3,
                }
            ]
        },
    )

    name: Annotated[str, Field(max_length=200)] | None = None
    operator: OperatorName
    provider: Annotated[str, Field(max_length=64)] | None = None
    target: SweepTarget
    shape: Annotated[dict[str, KnobValue], Field(max_length=64)]
    space: Annotated[
        dict[str, Annotated[list[KnobValue], Field(min_length=1, max_length=256)]],
        Field(min_length=1, max_length=16),
    ]
    strategy: Literal["grid", "random", "tpe", "gp", "model"] = "grid"
    repeats: Annotated[int, Field(ge=3, le=100)] = 3
    max_trials: Annotated[int, Field(ge=1, le=MAX_TRIALS)] = 48
    memory_limit_bytes: Annotated[int, Field(ge=1, le=2**50)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None

    @model_validator(mode="after")
    def _not_endless(self) -> SweepRequest:
        points = math.prod(len(values) for values in self.space.values())
        if points > MAX_POINTS:
            msg = f"the space has at most {MAX_POINTS} points, this one has {points:.3g}"
            raise ValueError(msg)
        return self


class Sweep(BaseModel):
    """A sweep and how far it is."""

    id: str
    name: str
    operator: str
    provider: str
    strategy: str
    ranks: int
    device: str
    hardware_id: str | None
    state: str
    reason: str | None
    max_trials: int
    trials: dict[str, int] = Field(description="How many trials are in each state")
    memory_limit_bytes: int | None = Field(description="Cap on the peak of one rank; null: the card's")
    spec: dict[str, Any]
    created_at: str | None
    started_at: str | None
    finished_at: str | None


class Trial(BaseModel):
    """One configuration of a sweep and its answer."""

    id: str
    sweep_id: str
    number: int
    state: str
    config: dict[str, Any]
    bound_bytes: int | None = Field(description="Eq. 6 bound of the operator on one rank")
    bound_terms: dict[str, int] | None
    latency_s: float | None = Field(description="Median of the fast mode, maximum over ranks")
    peak_bytes: int | None = Field(description="Highest measured peak over ranks")
    reason_kind: str | None
    reason: str | None
    proposed_by: str
    created_at: str | None
    started_at: str | None
    finished_at: str | None


class Attempt(BaseModel):
    """One try at a trial."""

    id: str
    number: int
    worker: str
    outcome: str | None
    reason_kind: str | None
    reason: str | None
    hardware_id: str | None
    software: dict[str, Any] | None
    log_tail: str | None
    claimed_at: str | None
    started_at: str | None
    finished_at: str | None


class Sample(BaseModel):
    """One rank's measurement of one pass of one repeat."""

    model_config = ConfigDict(populate_by_name=True)

    trial_id: str
    pass_: str = Field(alias="pass")
    rank: int
    repeat: int
    seconds: float
    allocated_bytes: int | None
    reserved_bytes: int | None
    peak_source: str


class TrialDetail(Trial):
    """A trial with everything that was measured and tried."""

    result: dict[str, Any] | None
    memory_limit_bytes: int | None
    attempts: list[Attempt]
    samples: list[Sample]
