"""Bodies of /v1/sweeps and /v1/trials."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tuner.sweeping.sweep_spec import SweepSpec

OperatorName = Literal["pipelined_llep", "ring_dtp", "checkpoint_offload", "stream_adamw"]


class SweepRequest(SweepSpec):
    """A sweep file as JSON, of an operator that ships: an adapter of one's own runs from a file only."""

    model_config = ConfigDict(
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

    operator: OperatorName
    max_trials: int = Field(default=1000, ge=1, le=10_000)


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
    worked_on: bool | None = Field(
        description="Of a running sweep: whether a worker holds a trial of it, or did within the last minute"
    )
    max_trials: int = Field(
        description="Most trials that are launched. With grid and random no more than the space has points; what was "
        "asked for is spec.max_trials. Trials that their bound rules out are never launched: they are counted under "
        "trials (infeasible), and with tpe, gp and model not in max_trials"
    )
    trials: dict[str, int] = Field(
        description="How many trials are in each state, those ruled out by their bound among the infeasible"
    )
    memory_limit_bytes: int | None = Field(description="Cap on the peak of one rank; null: the card's")
    spec: dict[str, Any]
    created_at: str | None
    started_at: str | None
    finished_at: str | None


class Flag(BaseModel):
    """A reason to doubt a trial's times: others used the machine, or a card did not run at its own clocks."""

    flag: str = Field(
        description="busy_host, shared_card, busy_card, card_memory, slowed_down or power_limited"
    )
    host: str
    detail: str


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
    slow_s: float | None = Field(
        description="Median of the slow mode; null where the latencies have one mode"
    )
    slow_share: float | None = Field(description="Share of the repeats that fell into the slow mode")
    peak_bytes: int | None = Field(description="Highest measured peak over ranks")
    reason_kind: str | None
    reason: str | None
    flags: list[Flag] = Field(description="What casts doubt on its times")
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
    environment: list[dict[str, Any]] = Field(
        description="Node by node: load of the host by others, clocks and power of the cards before and after"
    )
    memory_limit_bytes: int | None
    attempts: list[Attempt]
    samples: list[Sample]
