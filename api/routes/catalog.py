"""/v1/cost-models, /v1/models, /v1/clusters: what plans are made from."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Response

from api.auth import reads, writes
from api.etags import Conditional, stored
from api.routes.context import TAGGED, Cursor, Limit, Store, get_resource, problems
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
_STORES: dict[str, Any] = {
    "status_code": 201,
    "dependencies": [Depends(writes)],
    "response_model": StoredSpec,
    "responses": {
        **problems(409, 413, 415),
        200: {"description": "It was stored already, the same", "model": StoredSpec, **TAGGED},
        201: {"description": "Stored; Location is its address", **TAGGED},
    },
}
# The answer to PUT has no tag (RFC 9110, section 9.3.4): what is kept is completed from what was sent.
_REPLACES: dict[str, Any] = {
    "dependencies": [Depends(writes)],
    "responses": problems(404, 409, 412, 413, 415, 428),
}


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


@get_resource(router, "/cost-models/{cost_model_id}", CostModelDetail)
def get_cost_model(store: Store, cost_model_id: str, conditions: Conditional) -> Response:
    """One cost model with its rates and the report of its fit; ``promoted`` may change."""
    with store.reading() as session:
        return conditions.answer(service.get_cost_model(session, cost_model_id))


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


@router.post("/models", **_STORES)
def store_model(store: Store, body: ModelBody) -> Response:
    """Keep a model under a new name; another one of that name is replaced by PUT only."""
    with store.session() as session:
        return _kept("models", *service.store_model(session, body))


@get_resource(router, "/models/{model_id}", StoredSpec)
def get_model(store: Store, model_id: str, conditions: Conditional) -> Response:
    """One stored model, by its id or name."""
    with store.reading() as session:
        return conditions.answer(service.get_model(session, model_id))


@router.put("/models/{model_id}", **_REPLACES)
def replace_model(store: Store, model_id: str, body: ModelBody, conditions: Conditional) -> StoredSpec:
    """Replace a stored model, its name too; it keeps its id. If-Match says which version."""
    with store.session() as session:
        return service.replace_model(session, model_id, body, conditions.allow_replacement)


@router.get("/clusters", dependencies=[Depends(reads)], responses=problems())
def list_clusters(store: Store, cursor: Cursor = None, limit: Limit = 50) -> ClusterPage:
    """Stored clusters, and the presets."""
    with store.reading() as session:
        return service.list_clusters(session, cursor=cursor, limit=limit)


@router.post("/clusters", **_STORES)
def store_cluster(store: Store, body: ClusterBody) -> Response:
    """Keep a cluster under a new name; another one of that name is replaced by PUT only."""
    with store.session() as session:
        return _kept("clusters", *service.store_cluster(session, body))


@get_resource(router, "/clusters/{cluster_id}", StoredSpec)
def get_cluster(store: Store, cluster_id: str, conditions: Conditional) -> Response:
    """One stored cluster, by its id or name."""
    with store.reading() as session:
        return conditions.answer(service.get_cluster(session, cluster_id))


@router.put("/clusters/{cluster_id}", **_REPLACES)
def replace_cluster(store: Store, cluster_id: str, body: ClusterBody, conditions: Conditional) -> StoredSpec:
    """Replace a stored cluster, its name too; it keeps its id. If-Match says which version."""
    with store.session() as session:
        return service.replace_cluster(session, cluster_id, body, conditions.allow_replacement)


def _kept(plural: str, spec: StoredSpec, made: bool) -> Response:
    where = "Location" if made else "Content-Location"
    return stored(spec, status=201 if made else 200, headers={where: f"/v1/{plural}/{spec.id}"})
