"""Bodies of /v1/plans."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from api.schemas.common import Body
from cost_model.workload import MAX_IMBALANCE, MAX_TOKENS

StoredId = Annotated[str, Field(pattern=r"^[a-z]{2,4}_[0-9a-z]{1,32}$", max_length=40)]
PresetName = Annotated[str, Field(min_length=1, max_length=64)]
MAX_NODES = 100_000
MAX_RANKS = 2**20


class ModelRef(Body):
    """The model: exactly one of a Hugging Face ``config.json``, a full spec, a stored id or a shipped example."""

    hf_config: dict[str, Any] | None = Field(default=None, description="Contents of the model's config.json")
    spec: dict[str, Any] | None = Field(default=None, description="A full ModelSpec")
    id: StoredId | None = None
    example: Annotated[str, Field(max_length=64)] | None = Field(
        default=None, description="One of the examples that GET /v1/models lists"
    )
    name: Annotated[str, Field(max_length=200)] | None = Field(
        default=None, description="What to call the model in the plan; only beside hf_config."
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> ModelRef:
        if sum(value is not None for value in (self.hf_config, self.spec, self.id, self.example)) != 1:
            raise ValueError("give exactly one of hf_config, spec, id and example")
        return self


class ClusterRef(Body):
    """The cluster: exactly one of a preset, a full spec and a stored id; ``nodes`` overrides its node count."""

    preset: PresetName | None = None
    spec: dict[str, Any] | None = Field(default=None, description="A full ClusterSpec")
    id: StoredId | None = None
    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)] | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> ClusterRef:
        if sum(value is not None for value in (self.preset, self.spec, self.id)) != 1:
            raise ValueError("give exactly one of preset, spec and id")
        return self


class WorkloadBody(Body):
    """What one update trains on."""

    context_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    global_batch_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    imbalance: Annotated[float, Field(ge=1, le=MAX_IMBALANCE)] = 1.3
    migrated_experts: Annotated[int, Field(ge=0, le=100_000)] = 0
    activation_bytes: Literal[2, 4, 8] = 2


Degree = Annotated[int, Field(ge=1, le=MAX_RANKS)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]


class PinsBody(Body):
    """Launch keys to hold fast; the planner chooses the others."""

    sequence_degree: Degree | None = None
    expert_degree: Degree | None = None
    vocab_degree: Degree | None = None
    max_tokens_per_rank: Tokens | None = None
    accumulation_steps: Tokens | None = None
    chunk_tokens: Tokens | None = None
    max_chunks: Tokens | None = None
    dispatch_schedule: Literal["serial", "prefetch", "overlap"] | None = None
    strip_rows: Tokens | None = None
    ring_mode: Literal["activations", "weights"] | None = None
    host_budget_bytes: Annotated[int, Field(ge=0, le=2**50)] | None = None
    optimizer_engine: Literal["device", "stream", "host", "split"] | None = None
    bucket_params: Annotated[int, Field(ge=1, le=2**40)] | None = None
    staging_slots: Annotated[int, Field(ge=1, le=64)] | None = None
    host_share: Annotated[float, Field(ge=0, le=1)] | None = None

    def given(self) -> dict[str, Any]:
        """The keys that are pinned."""
        return self.model_dump(exclude_none=True)


class OptionsBody(Body):
    """How to plan."""

    fixed: PinsBody = Field(
        default=PinsBody(), description="Launch keys to pin, for example what a sweep showed."
    )

    mode: Literal["expected", "guarantee"] = "expected"
    cost_model_id: StoredId | None = Field(
        default=None,
        description="A stored cost model; without it the promoted one of this hardware, else the shipped.",
    )


class PlanRequest(Body):
    """Asks: does it fit, what peaks, which launch parameters, how fast."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "model": {"example": "gpt-oss-20b"},
                    "cluster": {"preset": "hgx-h200", "nodes": 1},
                    "workload": {"context_tokens": 131072, "global_batch_tokens": 524288},
                }
            ]
        },
    )

    model: ModelRef
    cluster: ClusterRef
    workload: WorkloadBody
    options: OptionsBody = OptionsBody()


class Plan(BaseModel):
    """A plan: the object that ``flatpeak plan --json`` prints, with its id."""

    model_config = ConfigDict(extra="allow")

    id: str
    created_at: str
    verdict: Literal["fits", "at_risk", "does_not_fit"]
    mode: Literal["expected", "guarantee"]
    launch: dict[str, Any] | None
    memory: dict[str, Any] | None
    step_time: dict[str, Any] | None
    cost_model_id: str | None


class PlanSummary(BaseModel):
    """A plan in a list."""

    id: str
    created_at: str
    verdict: str
    mode: str
    model: str
    cluster: str
    context_tokens: int | None
    global_batch_tokens: int | None
    total_s: float | None
    footprint_bytes: int | None
    hbm_bytes: int | None
    cost_model_id: str | None
