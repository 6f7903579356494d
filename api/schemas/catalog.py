"""Bodies of /v1/cost-models, /v1/models, /v1/clusters, /healthz and /readyz."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from api.schemas.common import Body


class CostModel(BaseModel):
    """A version of a cost model. ``promoted`` is the one that plans of its hardware use."""

    id: str
    hardware_id: str
    version: int
    promoted: bool
    created_at: str | None
    report: dict[str, Any] | None


class CostModelDetail(CostModel):
    """A cost model with its rates."""

    model: dict[str, Any]


class ParityPoint(BaseModel):
    """One measured configuration beside what a cost model says of it."""

    model_config = ConfigDict(populate_by_name=True)

    operator: str
    pass_: str = Field(alias="pass")
    config: dict[str, Any]
    measured_s: float
    predicted_s: float
    low_s: float
    high_s: float
    provenance: str


class StoredSpec(BaseModel):
    """A stored model or cluster."""

    id: str
    name: str
    created_at: str | None
    spec: dict[str, Any]


class Preset(BaseModel):
    """A cluster that ships with flatpeak."""

    preset: str
    spec: dict[str, Any]


class ClusterPage(BaseModel):
    """Stored clusters, and the presets beside them."""

    items: list[StoredSpec]
    next_cursor: str | None
    presets: list[Preset]


class ModelPage(BaseModel):
    """Stored models, and the examples beside them."""

    items: list[StoredSpec]
    next_cursor: str | None
    examples: list[str]


def _is_no_id(name: str) -> str:
    """An address names one resource: by its id, or by its name."""
    if re.fullmatch(r"[a-z]{3}_[0-9a-z]{26}", name):
        msg = "a name must not look like an id: choose one of your own words"
        raise ValueError(msg)
    return name


Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_is_no_id)]


class ModelBody(Body):
    """A model to keep: a Hugging Face config or a full spec."""

    name: Name
    hf_config: dict[str, Any] | None = None
    spec: dict[str, Any] | None = None


class ClusterBody(Body):
    """A cluster to keep."""

    name: Name
    spec: dict[str, Any]


class Health(BaseModel):
    """The process answers."""

    status: Literal["ok"]


class Readiness(BaseModel):
    """What the service can do now, part by part."""

    ready: bool
    database: dict[str, Any]
    presets: list[str]
    cost_models: dict[str, Any]
    covers: str
