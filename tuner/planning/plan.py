"""Plan: the answer to "does it fit, what peaks, which launch parameters, how fast", and its JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cost_model.cluster_spec import ClusterSpec
from cost_model.launch import LaunchConfig
from cost_model.memory import MemoryReport, Mode, VerdictName
from cost_model.model_spec import ModelSpec
from cost_model.provenance import Estimate
from cost_model.step import StepTime
from cost_model.workload import Workload
from tuner.rows.measured import MeasuredFronts


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How a plan is made.

    Attributes:
        mode: what the verdict rests on; both modes are always printed.
        alternatives: runners-up to keep, one a layout.
        fixed: launch keys pinned to values.
        measured: points of a sweep that replace the model's where shape and hardware are the same.
        send_ratio: largest over mean send of the all-to-all; None takes the workload's imbalance.
        software: what the job will run under; other than the cost model's widens its intervals.
        remedies: whether to search for what would fit when this does not.
    """

    mode: Mode = "expected"
    alternatives: int = 4
    fixed: Mapping[str, Any] = field(default_factory=dict)
    measured: MeasuredFronts | None = None
    send_ratio: float | None = None
    software: str | None = None
    remedies: bool = True


@dataclass(frozen=True, slots=True)
class Alternative:
    """A runner-up: another layout's best launch."""

    verdict: VerdictName
    launch: LaunchConfig
    step_time: Estimate
    footprint_bytes: int
    host_bytes_per_node: int

    def to_json(self) -> dict[str, Any]:
        """Plain figures."""
        return {
            "verdict": self.verdict,
            "launch": self.launch.to_json(),
            "step_time_s": self.step_time.value,
            "footprint_bytes": self.footprint_bytes,
            "host_bytes_per_node": self.host_bytes_per_node,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """The optimum for a model on a cluster under a workload."""

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    mode: Mode
    launch: LaunchConfig
    reports: Mapping[Mode, MemoryReport]
    step: StepTime
    alternatives: tuple[Alternative, ...]
    what_would_fit: Mapping[str, Any] | None
    warnings: tuple[str, ...]
    cost_model_id: str
    provenance: Mapping[str, Mapping[str, Any]]

    @property
    def report(self) -> MemoryReport:
        """Memory in the mode the verdict rests on."""
        return self.reports[self.mode]

    @property
    def verdict(self) -> VerdictName:
        """``fits``, ``at_risk`` or ``does_not_fit``."""
        return self.report.verdict

    def to_json(self) -> dict[str, Any]:
        """The object that the command line prints and the service returns (without an id)."""
        body: dict[str, Any] = {
            "verdict": self.verdict,
            "mode": self.mode,
            "model": _model_json(self.model),
            "cluster": _cluster_json(self.cluster),
            "workload": _workload_json(self.workload),
            "launch": self.launch.to_json(),
            "memory": memory_json(self.reports, self.mode),
            "step_time": self.step.to_json(),
            "binding": binding_json(self.report),
            "alternatives": [alternative.to_json() for alternative in self.alternatives],
            "warnings": list(self.warnings),
            "cost_model_id": self.cost_model_id,
            "provenance": {pointer: dict(entry) for pointer, entry in self.provenance.items()},
        }
        if self.what_would_fit is not None:
            body["what_would_fit"] = dict(self.what_would_fit)
        return body


def memory_json(reports: Mapping[Mode, MemoryReport], mode: Mode) -> dict[str, Any]:
    """Memory of the verdict's mode, with both modes' totals beside it."""
    report = reports[mode]
    return {
        "terms": dict(report.terms),
        "bound_bytes": report.bound_bytes,
        "expected_bytes": report.expected_bytes,
        "phase_bytes": report.phase_bytes,
        "footprint_bytes": report.footprint_bytes,
        "hbm_bytes": report.hbm_bytes,
        "phases": {name: dict(live) for name, live in report.phases.items()},
        "host_terms": dict(report.host_terms),
        "host_bytes_per_node": report.host_bytes_per_node,
        "host_limit_bytes": report.host_limit_bytes,
        "modes": {
            name: {
                "verdict": other.verdict,
                "closed_form_bytes": sum(other.terms.values()),
                "phase_bytes": other.phase_bytes,
                "footprint_bytes": other.footprint_bytes,
                "host_bytes_per_node": other.host_bytes_per_node,
                "terms": dict(other.terms),
            }
            for name, other in reports.items()
        },
    }


def binding_json(report: MemoryReport) -> dict[str, Any]:
    """The live set that decides the peak, and the next one."""
    phases = report.binding_phases

    def entry(place: int) -> dict[str, Any]:
        name, nbytes = phases[place]
        live = {term: size for term, size in report.phases[name].items() if size}
        return {"live_set": name, "bytes": nbytes, "terms": dict(sorted(live.items(), key=lambda kv: -kv[1]))}

    body = entry(0)
    body["next"] = entry(1) if len(phases) > 1 else None
    return body


def _model_json(model: ModelSpec) -> dict[str, Any]:
    return {**model.to_json(), "total_params": model.total_params}


def _cluster_json(cluster: ClusterSpec) -> dict[str, Any]:
    return {
        "name": cluster.name,
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "world_size": cluster.world_size,
        "gpu": cluster.gpu.name,
        "hardware_id": cluster.hardware_id,
        "max_chunk_tokens": cluster.max_chunk_tokens,
    }


def _workload_json(workload: Workload) -> dict[str, Any]:
    return {
        "context_tokens": workload.context_tokens,
        "global_batch_tokens": workload.global_batch_tokens,
        "imbalance": workload.imbalance,
        "migrated_experts": workload.migrated_experts,
        "activation_bytes": workload.activation_bytes,
    }
