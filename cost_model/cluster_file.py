"""ClusterSpec from and to YAML or JSON.

A figure is a plain number (stated by whoever wrote the file) or ``{value, source}``. ``read_cluster`` and
``cluster_to_mapping`` are each other's inverse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from cost_model.cluster_spec import ClusterSpec, Figure, GpuSpec, HostSpec, LinkTier
from cost_model.errors import RuleError
from cost_model.field_rules import sentence
from cost_model.text_file import read_text
from cost_model.topology_file import TopologyEntry, check_topology, topology_to_mapping

MAX_RANKS = 2**20
EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Figure(_Entry):
    value: Annotated[float, Field(gt=0, allow_inf_nan=False, lt=1e30)]
    source: Literal["datasheet", "measured", "assumed", "stated"] = "stated"

    def figure(self) -> Figure:
        return Figure(self.value, self.source)


class _Zeroable(_Figure):
    value: Annotated[float, Field(ge=0, allow_inf_nan=False, lt=1e30)]


def _wrap(value: Any) -> Any:
    # A plain number is a figure that the file's author states. YAML 1.1 reads 1e12 as text.
    if isinstance(value, str) and EXPONENT.fullmatch(value):
        value = float(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return {"value": value} if is_number else value


Number = Annotated[_Figure, BeforeValidator(_wrap)]
NumberOrZero = Annotated[_Zeroable, BeforeValidator(_wrap)]
Count = Annotated[int, Field(ge=1, le=MAX_RANKS)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


class _Gpu(_Entry):
    name: Name
    device: Literal["cuda", "cpu"] = "cuda"
    compute_capability: str = ""
    sm_count: Annotated[int, Field(ge=0, le=2**20)] = 0
    hbm_bytes: Number
    peak_flops: Number
    hbm_bandwidth_bytes_per_s: Number


class _HostLink(_Entry):
    active_gpus: Count
    bytes_per_s: Number


class _Host(_Entry):
    ram_bytes: Number
    cores: Count
    cpu_name: str = ""
    link_bytes_per_s: Annotated[list[_HostLink], Field(min_length=1)]
    cpu_adam_params_per_s: Number


class _Tier(_Entry):
    scope: Literal["node", "cluster"]
    name: Name
    latency_s: NumberOrZero
    bandwidth_bytes_per_s: Number


class _Cluster(_Entry):
    name: Name
    nodes: Count
    gpus_per_node: Count
    gpu: _Gpu
    host: _Host
    tiers: Annotated[list[_Tier], Field(min_length=1)]
    max_chunk_tokens: Annotated[int, Field(ge=1)] | None = None
    outside_allocator_bytes: NumberOrZero = _Zeroable(value=3.0 * 2**30, source="assumed")
    allocator_slack_fraction: NumberOrZero = _Zeroable(value=0.06, source="assumed")
    topology: TopologyEntry | None = None
    notes: Annotated[list[Annotated[str, Field(max_length=1000)]], Field(max_length=1000)] = []


def load_cluster(path: str | Path) -> ClusterSpec:
    """Read a cluster from a YAML or JSON file.

    Raises:
        RuleError: the file cannot be read or parsed, or describes no usable cluster.
    """
    file = Path(path)
    try:
        text = read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        detail = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise RuleError(
            rule="a cluster file must be a readable text file",
            value=str(path),
            remedy=f"Give the path of a YAML or JSON file, or a preset's name ({detail}).",
        ) from None
    try:
        mapping = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        detail = " ".join(str(error).split())
        raise RuleError(
            rule="a cluster file must be valid YAML or JSON",
            value=str(path),
            remedy=f"Correct it: {detail}.",
        ) from None
    return read_cluster(mapping)


def read_cluster(mapping: Mapping[str, Any]) -> ClusterSpec:
    """A cluster from the parsed mapping of its file.

    Raises:
        RuleError: a field is missing, unknown, or out of range; the rule names its path.
    """
    try:
        body = _Cluster.model_validate(_plain(mapping))
    except ValidationError as error:
        raise _first(error) from None
    written = sorted(body.host.link_bytes_per_s, key=lambda link: link.active_gpus)
    links = [(link.active_gpus, link.bytes_per_s.figure()) for link in written]
    spec = ClusterSpec(
        name=body.name,
        nodes=body.nodes,
        gpus_per_node=body.gpus_per_node,
        gpu=GpuSpec(
            name=body.gpu.name,
            device=body.gpu.device,
            compute_capability=body.gpu.compute_capability,
            sm_count=body.gpu.sm_count,
            hbm_bytes=body.gpu.hbm_bytes.figure(),
            peak_flops=body.gpu.peak_flops.figure(),
            hbm_bandwidth_bytes_per_s=body.gpu.hbm_bandwidth_bytes_per_s.figure(),
        ),
        host=HostSpec(
            ram_bytes=body.host.ram_bytes.figure(),
            cores=body.host.cores,
            cpu_name=body.host.cpu_name,
            link_bytes_per_s=tuple(links),
            cpu_adam_params_per_s=body.host.cpu_adam_params_per_s.figure(),
        ),
        tiers=tuple(
            LinkTier(t.scope, t.name, t.latency_s.figure(), t.bandwidth_bytes_per_s.figure())
            for t in body.tiers
        ),
        max_chunk_tokens=body.max_chunk_tokens,
        outside_allocator_bytes=body.outside_allocator_bytes.figure(),
        allocator_slack_fraction=body.allocator_slack_fraction.figure(),
        topology=None if body.topology is None else body.topology.topology(),
        notes=tuple(body.notes),
    )
    _check(spec)
    check_topology(spec)
    return spec


def cluster_to_mapping(cluster: ClusterSpec) -> dict[str, Any]:
    """The mapping that ``read_cluster`` reads back to an equal spec."""
    gpu, host = cluster.gpu, cluster.host
    known: dict[str, Any] = {}
    if cluster.topology is not None:
        known["topology"] = topology_to_mapping(cluster.topology)
    if cluster.notes:
        known["notes"] = list(cluster.notes)
    return {
        "name": cluster.name,
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "gpu": {
            "name": gpu.name,
            "device": gpu.device,
            "compute_capability": gpu.compute_capability,
            "sm_count": gpu.sm_count,
            "hbm_bytes": _out(gpu.hbm_bytes),
            "peak_flops": _out(gpu.peak_flops),
            "hbm_bandwidth_bytes_per_s": _out(gpu.hbm_bandwidth_bytes_per_s),
        },
        "host": {
            "ram_bytes": _out(host.ram_bytes),
            "cores": host.cores,
            "cpu_name": host.cpu_name,
            "link_bytes_per_s": [
                {"active_gpus": active, "bytes_per_s": _out(figure)}
                for active, figure in host.link_bytes_per_s
            ],
            "cpu_adam_params_per_s": _out(host.cpu_adam_params_per_s),
        },
        "tiers": [
            {
                "scope": tier.scope,
                "name": tier.name,
                "latency_s": _out(tier.latency_s),
                "bandwidth_bytes_per_s": _out(tier.bandwidth_bytes_per_s),
            }
            for tier in cluster.tiers
        ],
        "max_chunk_tokens": cluster.max_chunk_tokens,
        "outside_allocator_bytes": _out(cluster.outside_allocator_bytes),
        "allocator_slack_fraction": _out(cluster.allocator_slack_fraction),
        **known,
    }


def _out(figure: Figure) -> dict[str, Any]:
    return {"value": figure.value, "source": figure.source}


def _plain(mapping: object) -> object:
    """Lists of pairs are what ``HostSpec`` itself holds; accept them beside the written-out form."""
    if not isinstance(mapping, Mapping):
        return mapping
    host = mapping.get("host")
    if not isinstance(host, Mapping) or not isinstance(host.get("link_bytes_per_s"), list | tuple):
        return dict(mapping)
    links = [
        {"active_gpus": link[0], "bytes_per_s": link[1]}
        if isinstance(link, list | tuple) and len(link) == 2
        else link
        for link in host["link_bytes_per_s"]
    ]
    return {**mapping, "host": {**host, "link_bytes_per_s": links}}


def _check(spec: ClusterSpec) -> None:
    if spec.world_size > MAX_RANKS:
        raise RuleError(
            rule=f"a cluster has at most {MAX_RANKS} ranks",
            value=spec.world_size,
            remedy="Correct nodes or gpus_per_node.",
        )
    active = [count for count, _ in spec.host.link_bytes_per_s]
    if len(set(active)) != len(active):
        raise RuleError(
            rule="host.link_bytes_per_s gives one rate per number of active GPUs",
            value=active,
            remedy="Remove the repeated entry.",
        )
    if spec.nodes > 1 and not any(tier.scope == "cluster" for tier in spec.tiers):
        raise RuleError(
            rule="a cluster of several nodes must give a link tier of scope 'cluster'",
            value=[tier.name for tier in spec.tiers],
            remedy="Add the network between nodes to tiers.",
        )
    if spec.gpus_per_node > 1 and not any(tier.scope == "node" for tier in spec.tiers):
        raise RuleError(
            rule="a node of several GPUs must give a link tier of scope 'node'",
            value=[tier.name for tier in spec.tiers],
            remedy="Add the links inside a node to tiers.",
        )
    if spec.allocator_slack_fraction.value >= 1:
        raise RuleError(
            rule="allocator_slack_fraction is a share of the allocated peak, below 1",
            value=spec.allocator_slack_fraction.value,
            remedy="Use for example 0.06.",
        )


def _first(error: ValidationError) -> RuleError:
    """The first of pydantic's findings; a user mends one at a time, the rest is counted."""
    findings = error.errors(include_url=False)
    first = findings[0]
    path = ".".join(str(part) for part in first["loc"]) or "the cluster"
    more = f" ({len(findings) - 1} more to correct)" if len(findings) > 1 else ""
    if first["type"] == "missing":
        return RuleError(
            rule=f"a cluster must give {path}",
            value="nothing",
            remedy=f"Add {path}; a preset's mapping shows the whole form.{more}",
        )
    if first["type"] == "model_type":
        return RuleError(
            rule=f"{path} must be a mapping",
            value=first["input"],
            remedy=f"Give {path} as a mapping; a preset's mapping shows the whole form.{more}",
        )
    return RuleError(
        rule=sentence(first, "the cluster"),
        value=first["input"],
        remedy=f"Correct {path}.{more}",
    )
