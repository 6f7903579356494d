"""Models, clusters, workloads and launches from what a user gives: a file, a name, an id or a mapping."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from sqlalchemy.orm import Session

from api.errors import NotFound
from api.schemas.plans import ClusterRef, ModelRef
from cost_model.cluster_file import MAX_RANKS, load_cluster, read_cluster
from cost_model.cluster_spec import ClusterSpec
from cost_model.errors import RuleError
from cost_model.field_rules import rule_of
from cost_model.hf_config import read_hf_config
from cost_model.launch import LaunchConfig
from cost_model.model_spec import ModelSpec
from cost_model.presets import PRESET_NAMES, preset
from cost_model.text_file import read_text
from db.repositories import ClusterRepository, ModelRepository

Spec = TypeVar("Spec")
_MAX_COUNT = 2**48
_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in (ModelSpec, LaunchConfig)}
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "models"
"""Configs beside the source tree; an installed package has none."""


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        RuleError: no such file, or not one JSON object; the remedy names line and column.
    """
    try:
        body = json.loads(read_text(path))
    except (OSError, UnicodeDecodeError) as error:
        raise RuleError(
            rule=f"{what} must be a readable file",
            value=str(path),
            remedy=f"Check the path ({_os_text(error)}).",
        ) from error
    except (RecursionError, ValueError) as error:  # ValueError: JSON, or a number of thousands of digits
        where = _place(error)
        raise RuleError(
            rule=f"{what} must be valid JSON", value=f"{path}: {where}", remedy=f"Mend it there: {error}."
        ) from error
    if not isinstance(body, dict):
        raise RuleError(
            rule=f"{what} must hold one JSON object",
            value=f"{path}: {type(body).__name__}",
            remedy="Put the fields into one object.",
        )
    return body


def _place(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno} column {error.colno}"
    return "depth" if isinstance(error, RecursionError) else "a number"


def _os_text(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else "not UTF-8 text"


def model_from_file(path: Path) -> ModelSpec:
    """A ModelSpec from a ``config.json``, the folder that holds one, or a full spec saved as JSON.

    Raises:
        RuleError: the file cannot be read as either.
    """
    file = path / "config.json" if path.is_dir() else path
    body = read_mapping(file, "the model's config.json")
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    return model_from_mapping(body, name=name)


def model_from_mapping(body: Mapping[str, Any], *, name: str | None = None) -> ModelSpec:
    """A ModelSpec from a Hugging Face config, or from a full spec (it has ``expert_intermediate`` and ``family``)."""
    if {"family", "expert_intermediate", "attention"} <= body.keys():
        return read_spec(ModelSpec, body, "the model")
    return read_hf_config(body, name=name)


def cluster_from_text(text: str, nodes: int | None) -> ClusterSpec:
    """A preset's name or a cluster file; ``nodes`` sets the node count.

    Raises:
        RuleError: neither, or the cluster is not usable.
    """
    if text in PRESET_NAMES:
        return preset(text, 1 if nodes is None else nodes)
    if not Path(text).exists() and not Path(text).suffix:
        return preset(text, 1)
    return with_nodes(load_cluster(text), nodes)


def with_nodes(cluster: ClusterSpec, nodes: int | None) -> ClusterSpec:
    """The cluster with another node count, checked anew."""
    if nodes is None or nodes == cluster.nodes:
        return cluster
    if nodes < 1:
        raise RuleError(rule="nodes must be at least 1", value=nodes, remedy="Use 1 for one node.")
    if nodes > 1 and not any(tier.scope == "cluster" for tier in cluster.tiers):
        raise RuleError(
            rule="a cluster of several nodes must give a link tier of scope 'cluster'",
            value=nodes,
            remedy="Add the network between nodes to the cluster's tiers.",
        )
    if nodes * cluster.gpus_per_node > MAX_RANKS:
        raise RuleError(
            rule=f"a cluster has at most {MAX_RANKS} ranks",
            value=nodes * cluster.gpus_per_node,
            remedy=f"Use at most {max(1, MAX_RANKS // cluster.gpus_per_node)} nodes.",
        )
    return dataclasses.replace(cluster, nodes=nodes)


def model_of(ref: ModelRef, session: Session) -> ModelSpec:
    """The model a request names.

    Raises:
        NotFound: no stored model has the id, or no example the name.
        RuleError: the config or spec is not a model that can be planned.
    """
    if ref.hf_config is not None:
        return read_hf_config(ref.hf_config, name=ref.name)
    if ref.spec is not None:
        return read_spec(ModelSpec, ref.spec, "model.spec")
    if ref.example is not None:
        return example_model(ref.example)
    row = ModelRepository(session).find(str(ref.id))
    if row is None:
        raise NotFound("stored model", ref.id)
    return model_from_mapping(row.spec_json, name=row.name)


def cluster_of(ref: ClusterRef, session: Session) -> ClusterSpec:
    """The cluster a request names.

    Raises:
        NotFound: no stored cluster has the id.
        RuleError: the spec is not a usable cluster.
    """
    if ref.preset is not None:
        return preset(ref.preset, 1 if ref.nodes is None else ref.nodes)
    if ref.spec is not None:
        return with_nodes(read_cluster(ref.spec), ref.nodes)
    row = ClusterRepository(session).find(str(ref.id))
    if row is None:
        raise NotFound("stored cluster", ref.id)
    return with_nodes(read_cluster(row.spec_json), ref.nodes)


def example_names() -> list[str]:
    """Names of the example models at hand."""
    return sorted(file.stem for file in EXAMPLES.glob("*.json"))


def example_model(name: str) -> ModelSpec:
    """An example model.

    Raises:
        NotFound: there is none of that name.
    """
    if name not in example_names():
        raise NotFound("example model", name)
    return model_from_file(EXAMPLES / f"{name}.json")


def launch_from_mapping(body: Mapping[str, Any]) -> LaunchConfig:
    """The launch in a ``launch.json``, or in a plan that holds one.

    Raises:
        RuleError: a knob is missing, unknown or of the wrong type.
    """
    inner = body.get("launch", body)
    if not isinstance(inner, Mapping):
        raise RuleError(
            rule="launch must be an object", value=inner, remedy="Give a file that flatpeak exported."
        )
    knobs = {
        "lambda_" if key == "lambda" else key: value
        for key, value in inner.items()
        if key != "schema_version"
    }
    return read_spec(LaunchConfig, knobs, "launch")


def read_spec(kind: type[Spec], body: Mapping[str, Any], what: str) -> Spec:
    """A frozen dataclass of ours from a mapping: no unknown key, right types, no count out of range.

    Raises:
        RuleError: naming the path of the first value that is wrong.
    """
    _refuse_unknown(kind, body, what)
    try:
        spec: Spec = _ADAPTERS[kind].validate_python(dict(body))
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join([what, *(str(part) for part in first["loc"])])
        raise RuleError(
            rule=f"{path} {rule_of(first)}", value=first["input"], remedy=f"Mend {path}."
        ) from error
    _refuse_out_of_range(spec, what)
    return spec


def _refuse_unknown(kind: type[Any], body: Mapping[str, Any], what: str) -> None:
    known = {field.name for field in dataclasses.fields(kind)}
    unknown = sorted(str(key) for key in body if key not in known)
    if unknown:
        raise RuleError(
            rule=f"{what} may only have the fields {', '.join(sorted(known))}",
            value=unknown,
            remedy=f"Remove {', '.join(unknown)}.",
        )


def _refuse_out_of_range(spec: object, what: str) -> None:
    assert dataclasses.is_dataclass(spec)
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if dataclasses.is_dataclass(value):
            _refuse_out_of_range(value, f"{what}.{field.name}")
        elif isinstance(value, (int, float)) and not 0 <= value <= _MAX_COUNT:
            raise RuleError(
                rule=f"{what}.{field.name} must lie between 0 and {_MAX_COUNT}",
                value=value,
                remedy=f"Mend {what}.{field.name}.",
            )
