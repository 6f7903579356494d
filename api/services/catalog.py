"""Stored models, clusters and cost models as the API shows them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from api.errors import Conflict, NotFound
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
from db.repositories.specs import Row, SpecRepository
from db.tables import CostModelRow, StoredCluster, StoredModel

Allow = Callable[[StoredSpec], None]


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


def store_model(session: Session, body: ModelBody) -> tuple[StoredSpec, bool]:
    """Keep a model under a new name, and whether it was made: not when it is there already, and the same.

    What is stored is the full spec, read and checked.

    Raises:
        RuleError: it is not a model that can be planned.
        Conflict: another one has the name.
    """
    return _store(ModelRepository(session), "model", body.name, _model_spec(body))


def replace_model(session: Session, model_id: str, body: ModelBody, allow: Allow) -> StoredSpec:
    """Put another model, and name, in a stored one's place; it keeps its id.

    Args:
        allow: is shown the stored one, locked, and raises if it must not be replaced.

    Raises:
        NotFound: there is none.
        RuleError: it is not a model that can be planned.
        Conflict: another one has the name.
    """
    spec = _model_spec(body)
    return _replace(ModelRepository(session), model_id, body.name, spec, kind="model", allow=allow)


def _model_spec(body: ModelBody) -> dict[str, Any]:
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
    return dataclasses.asdict(spec)


def get_model(session: Session, model_id: str) -> StoredSpec:
    """One stored model.

    Raises:
        NotFound: there is none.
    """
    return _stored(_found(ModelRepository(session).find(model_id), "model", model_id))


def list_clusters(session: Session, *, cursor: str | None, limit: int) -> ClusterPage:
    """A page of stored clusters, and the presets with one node each."""
    page = ClusterRepository(session).page(cursor=decode_cursor(cursor), limit=limit)
    return ClusterPage(
        items=[_stored(row) for row in page.items],
        next_cursor=_next(page.next_cursor),
        presets=[Preset(preset=name, spec=cluster_to_mapping(preset(name, 1))) for name in PRESET_NAMES],
    )


def store_cluster(session: Session, body: ClusterBody) -> tuple[StoredSpec, bool]:
    """As :func:`store_model`, of a cluster."""
    cluster = dataclasses.replace(read_cluster(body.spec), name=body.name)
    spec = cluster_to_mapping(cluster)
    return _store(ClusterRepository(session), "cluster", body.name, spec, hardware_id=cluster.hardware_id)


def replace_cluster(session: Session, cluster_id: str, body: ClusterBody, allow: Allow) -> StoredSpec:
    """As :func:`replace_model`, of a cluster."""
    cluster = dataclasses.replace(read_cluster(body.spec), name=body.name)
    return _replace(
        ClusterRepository(session),
        cluster_id,
        body.name,
        cluster_to_mapping(cluster),
        kind="cluster",
        allow=allow,
        hardware_id=cluster.hardware_id,
    )


def get_cluster(session: Session, cluster_id: str) -> StoredSpec:
    """One stored cluster.

    Raises:
        NotFound: there is none.
    """
    return _stored(_found(ClusterRepository(session).find(cluster_id), "cluster", cluster_id))


def _found(row: Row | None, kind: str, asked: str) -> Row:
    if row is None:
        raise NotFound(f"stored {kind}", asked)
    return row


def _store(
    repository: SpecRepository[Row], kind: str, name: str, spec: dict[str, Any], **columns: str | None
) -> tuple[StoredSpec, bool]:
    there = repository.named(name)
    if there is None:
        try:
            return _stored(repository.add(name, spec, **columns)), True
        except IntegrityError:  # taken this moment
            repository.rollback()
            there = repository.named(name)
            if there is None:  # and given up again
                raise _taken(kind, name, "Send it again.") from None
    if there.spec_json != json.loads(json.dumps(spec)):
        raise _taken(kind, name, f"PUT /v1/{kind}s/{there.id} with If-Match replaces it; or choose another.")
    return _stored(there), False


def _replace(
    repository: SpecRepository[Row],
    asked: str,
    name: str,
    spec: dict[str, Any],
    *,
    kind: str,
    allow: Allow,
    **columns: str | None,
) -> StoredSpec:
    row = _found(repository.find(asked, lock=True), kind, asked)
    other = repository.named(name)
    remedy = f"Keep its own, or choose one that GET /v1/{kind}s does not list."
    if other is not None and other.id != row.id:
        raise _taken(kind, name, remedy)
    allow(_stored(row))
    try:
        return _stored(repository.replace(row, name, spec, **columns))
    except IntegrityError:
        raise _taken(kind, name, remedy) from None


def _taken(kind: str, name: str, remedy: str) -> Conflict:
    return Conflict(rule=f"no other stored {kind} may have the name", value=name, remedy=remedy)


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
