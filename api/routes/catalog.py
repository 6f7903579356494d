"""/v1/cost-models, /v1/models, /v1/clusters: what plans are made from."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response

from api.auth import reads, writes
from api.routes.context import Cursor, Limit, Store, problems
from api.schemas.catalog import (
    ClusterBody,
    ClusterPage,
    CostModel,
    CostModelDetail,
    ModelBody,
    ModelPage,
    ParityPoint,
    StoredSpec,
)
from api.schemas.common import Page
from api.services import catalog as service
from api.services.parity import parity

router = APIRouter(prefix="/v1", tags=["catalog"])


@router.get("/cost-models", dependencies=[Depends(reads)], responses=problems())
def list_cost_models(
    store: Store,
    cursor: Cursor = None,
    limit: Limit = 50,
    hardware_id: Annotated[str | None, Query(max_length=128)] = None,
) -> Page[CostModel]:
    """Versions of cost models, newest first."""
    with store.reading() as session:
        return service.list_cost_models(session, cursor=cursor, limit=limit, hardware_id=hardware_id)


@router.get("/cost-models/{cost_model_id}", dependencies=[Depends(reads)], responses=problems(404))
def get_cost_model(store: Store, cost_model_id: str) -> CostModelDetail:
    """One cost model with its rates and the report of its fit."""
    with store.reading() as session:
        return service.get_cost_model(session, cost_model_id)


@router.get("/cost-models/{cost_model_id}/parity", dependencies=[Depends(reads)], responses=problems(404))
def cost_model_parity(store: Store, cost_model_id: str) -> Page[ParityPoint]:
    """Every measured configuration of the model's hardware beside the prediction; one page."""
    with store.reading() as session:
        return Page(items=parity(session, cost_model_id), next_cursor=None)


@router.get("/models", dependencies=[Depends(reads)], responses=problems())
def list_models(store: Store, cursor: Cursor = None, limit: Limit = 50) -> ModelPage:
    """Stored models, and the names of the examples."""
    with store.reading() as session:
        return service.list_models(session, cursor=cursor, limit=limit)


@router.post("/models", status_code=201, dependencies=[Depends(writes)], responses=problems(413, 415))
def store_model(store: Store, body: ModelBody, response: Response) -> StoredSpec:
    """Keep a model under a name; one of the same name is replaced and keeps its id."""
    with store.session() as session:
        stored = service.store_model(session, body)
    response.headers["Location"] = f"/v1/models/{stored.id}"
    return stored


@router.get("/models/{model_id}", dependencies=[Depends(reads)], responses=problems(404))
def get_model(store: Store, model_id: str) -> StoredSpec:
    """One stored model."""
    with store.reading() as session:
        return service.get_model(session, model_id)


@router.get("/clusters", dependencies=[Depends(reads)], responses=problems())
def list_clusters(store: Store, cursor: Cursor = None, limit: Limit = 50) -> ClusterPage:
    """Stored clusters, and the presets."""
    with store.reading() as session:
        return service.list_clusters(session, cursor=cursor, limit=limit)


@router.post("/clusters", status_code=201, dependencies=[Depends(writes)], responses=problems(413, 415))
def store_cluster(store: Store, body: ClusterBody, response: Response) -> StoredSpec:
    """Keep a cluster under a name; one of the same name is replaced and keeps its id."""
    with store.session() as session:
        stored = service.store_cluster(session, body)
    response.headers["Location"] = f"/v1/clusters/{stored.id}"
    return stored


@router.get("/clusters/{cluster_id}", dependencies=[Depends(reads)], responses=problems(404))
def get_cluster(store: Store, cluster_id: str) -> StoredSpec:
    """One stored cluster."""
    with store.reading() as session:
        return service.get_cluster(session, cluster_id)
