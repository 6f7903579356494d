"""Stored models, clusters and cost models as the API shows them."""

from __future__ import annotations

import dataclasses
from typing import Any

from sqlalchemy.orm import Session

from api.errors import NotFound
from api.schemas.catalog import (
    ClusterBody,
    ClusterPage,
    CostModel,
    CostModelDetail,
    ModelBody,
    ModelPage,
    Preset,
    StoredSpec,
)
from api.schemas.common import Page, decode_cursor, encode_cursor, timestamp
from api.services.specs import example_names, read_spec
from cost_model.cluster_file import cluster_to_mapping, read_cluster
from cost_model.errors import RuleError
from cost_model.hf_config import read_hf_config
from cost_model.model_spec import ModelSpec
from cost_model.presets import PRESET_NAMES, preset
from db.repositories import ClusterRepository, CostModelRepository, ModelRepository
from db.tables import CostModelRow, StoredCluster, StoredModel


def list_cost_models(
    session: Session, *, cursor: str | None, limit: int, hardware_id: str | None
) -> Page[CostModel]:
    """A page of cost models, newest first."""
    page = CostModelRepository(session).page(
        cursor=decode_cursor(cursor), limit=limit, hardware_id=hardware_id
    )
    return Page(
        items=[CostModel(**_cost_model(row)) for row in page.items], next_cursor=_next(page.next_cursor)
    )


def get_cost_model(session: Session, cost_model_id: str) -> CostModelDetail:
    """One cost model.

    Raises:
        NotFound: there is none.
    """
    row = CostModelRepository(session).find(cost_model_id)
    if row is None:
        raise NotFound("cost model", cost_model_id)
    return CostModelDetail(**_cost_model(row), model=row.model_json)


def list_models(session: Session, *, cursor: str | None, limit: int) -> ModelPage:
    """A page of stored models, and the examples."""
    page = ModelRepository(session).page(cursor=decode_cursor(cursor), limit=limit)
    return ModelPage(
        items=[_stored(row) for row in page.items],
        next_cursor=_next(page.next_cursor),
        examples=example_names(),
    )


def store_model(session: Session, body: ModelBody) -> StoredSpec:
    """Keep a model; what is stored is the full spec, read and checked.

    Raises:
        RuleError: it is not a model that can be planned.
    """
    if (body.hf_config is None) == (body.spec is None):
        raise RuleError(
            rule="a model is given by exactly one of hf_config and spec",
            value=sorted(key for key in ("hf_config", "spec") if getattr(body, key) is not None),
            remedy="Give the contents of config.json as hf_config.",
        )
    if body.spec is not None:
        spec = dataclasses.replace(read_spec(ModelSpec, body.spec, "spec"), name=body.name)
    else:
        spec = read_hf_config(body.hf_config or {}, name=body.name)
    return _stored(ModelRepository(session).put(body.name, dataclasses.asdict(spec)))


def get_model(session: Session, model_id: str) -> StoredSpec:
    """One stored model.

    Raises:
        NotFound: there is none.
    """
    row = ModelRepository(session).find(model_id)
    if row is None:
        raise NotFound("stored model", model_id)
    return _stored(row)


def list_clusters(session: Session, *, cursor: str | None, limit: int) -> ClusterPage:
    """A page of stored clusters, and the presets with one node each."""
    page = ClusterRepository(session).page(cursor=decode_cursor(cursor), limit=limit)
    return ClusterPage(
        items=[_stored(row) for row in page.items],
        next_cursor=_next(page.next_cursor),
        presets=[Preset(preset=name, spec=cluster_to_mapping(preset(name, 1))) for name in PRESET_NAMES],
    )


def store_cluster(session: Session, body: ClusterBody) -> StoredSpec:
    """Keep a cluster; what is stored is the full spec, read and checked.

    Raises:
        RuleError: it is not a usable cluster.
    """
    cluster = dataclasses.replace(read_cluster(body.spec), name=body.name)
    row = ClusterRepository(session).put(
        body.name, cluster_to_mapping(cluster), hardware_id=cluster.hardware_id
    )
    return _stored(row)


def get_cluster(session: Session, cluster_id: str) -> StoredSpec:
    """One stored cluster.

    Raises:
        NotFound: there is none.
    """
    row = ClusterRepository(session).find(cluster_id)
    if row is None:
        raise NotFound("stored cluster", cluster_id)
    return _stored(row)


def _stored(row: StoredModel | StoredCluster) -> StoredSpec:
    return StoredSpec(id=row.id, name=row.name, created_at=timestamp(row.created_at), spec=row.spec_json)


def _cost_model(row: CostModelRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "hardware_id": row.hardware_id,
        "version": row.version,
        "promoted": row.promoted,
        "created_at": timestamp(row.created_at),
        "report": row.report_json,
    }


def _next(cursor: str | None) -> str | None:
    return encode_cursor(cursor) if cursor else None
