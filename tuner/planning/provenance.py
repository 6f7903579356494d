"""Provenance of every predicted figure of a plan, by JSON pointer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cost_model.cluster_spec import ClusterSpec, Figure
from cost_model.memory import MemoryReport, Mode
from cost_model.provenance import Provenance
from cost_model.step import StepTime
from tuner.planning.plan import Alternative

_FORMULA_SPREAD = 0.05
"""Counted tensors against what an allocator hands out: block rounding, library workspaces."""
_OUTSIDE_FACTOR = 2.0
_SLACK_FACTOR = 3.0
_LEVEL = 0.9


def _entry(provenance: Provenance, low: float, high: float, note: str = "") -> dict[str, Any]:
    body: dict[str, Any] = {"provenance": provenance, "low": low, "high": high, "level": _LEVEL}
    if note:
        body["note"] = note
    return body


def _source(figure: Figure) -> Provenance:
    return "measured" if figure.source == "measured" else "analytic"


def _memory_terms(
    report: MemoryReport, worst: MemoryReport, cluster: ClusterSpec
) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    for name, value in report.terms.items():
        if name == "outside_allocator":
            source = _source(cluster.outside_allocator_bytes)
            factor = 1.2 if source == "measured" else _OUTSIDE_FACTOR
            entries[name] = _entry(source, value / factor, value * factor)
        elif name == "allocator_slack":
            source = _source(cluster.allocator_slack_fraction)
            entries[name] = _entry(source, value / _SLACK_FACTOR, value * _SLACK_FACTOR)
        else:
            high = max(value * (1 + _FORMULA_SPREAD), worst.terms[name])
            entries[name] = _entry("analytic", value * (1 - _FORMULA_SPREAD), high)
    return entries


def memory_provenance(
    reports: Mapping[Mode, MemoryReport], mode: Mode, cluster: ClusterSpec
) -> dict[str, dict[str, Any]]:
    """Entries under /memory and /binding. An expected figure's upper end is the guarantee's."""
    found: dict[str, dict[str, Any]] = {}
    worst = reports["guarantee"]
    for name, report in reports.items():
        terms = _memory_terms(report, worst, cluster)
        low = sum(entry["low"] for entry in terms.values())
        high = sum(entry["high"] for entry in terms.values())
        phase = _entry("analytic", report.phase_bytes * (1 - _FORMULA_SPREAD), worst.phase_bytes * 1.05)
        footprint = _entry(
            "analytic",
            phase["low"] + terms["outside_allocator"]["low"] + terms["allocator_slack"]["low"],
            phase["high"] + terms["outside_allocator"]["high"] + terms["allocator_slack"]["high"],
        )
        host = _entry("analytic", report.host_bytes_per_node * 0.95, report.host_bytes_per_node * 1.1)
        roots = [f"/memory/modes/{name}"] + (["/memory"] if name == mode else [])
        for root in roots:
            found.update({f"{root}/terms/{term}": entry for term, entry in terms.items()})
            found[f"{root}/phase_bytes"] = phase
            found[f"{root}/footprint_bytes"] = footprint
            found[f"{root}/host_bytes_per_node"] = host
        found[f"/memory/modes/{name}/closed_form_bytes"] = _entry("analytic", low, high)
        found["/memory/bound_bytes" if name == "guarantee" else "/memory/expected_bytes"] = _entry(
            "analytic", low, high
        )
    report = reports[mode]
    for phase_name, live in report.phases.items():
        for term, value in live.items():
            high = max(value * (1 + _FORMULA_SPREAD), worst.phases[phase_name][term])
            found[f"/memory/phases/{phase_name}/{term}"] = _entry(
                "analytic", value * (1 - _FORMULA_SPREAD), high
            )
    for term, value in report.host_terms.items():
        found[f"/memory/host_terms/{term}"] = _entry("analytic", value * 0.95, value * 1.1)
    for pointer, place in (("/binding", 0), ("/binding/next", 1)):
        if place >= len(report.binding_phases):
            continue
        phase_name, nbytes = report.binding_phases[place]
        found[f"{pointer}/bytes"] = _entry(
            "analytic",
            nbytes * (1 - _FORMULA_SPREAD),
            max(nbytes * 1.05, sum(worst.phases[phase_name].values())),
        )
        for term, value in report.phases[phase_name].items():
            if value:
                found[f"{pointer}/terms/{term}"] = found[f"/memory/phases/{phase_name}/{term}"]
    return found


def step_provenance(step: StepTime) -> dict[str, dict[str, Any]]:
    """Entries under /step_time."""
    found = {f"/step_time/terms/{name}": term.provenance_json() for name, term in step.terms.items()}
    found["/step_time/total_s"] = step.total.provenance_json()
    found["/step_time/interval_s"] = step.total.provenance_json()
    return found


def alternatives_provenance(alternatives: Sequence[Alternative]) -> dict[str, dict[str, Any]]:
    """Entries under /alternatives."""
    found: dict[str, dict[str, Any]] = {}
    for place, other in enumerate(alternatives):
        root = f"/alternatives/{place}"
        found[f"{root}/step_time_s"] = other.step_time.provenance_json()
        for name, value in (
            ("footprint_bytes", other.footprint_bytes),
            ("host_bytes_per_node", other.host_bytes_per_node),
        ):
            found[f"{root}/{name}"] = _entry("analytic", value * (1 - _FORMULA_SPREAD), value * 1.1)
    return found


def remedy_provenance(remedy: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Entries under /what_would_fit: the memory that the launch at hand would need."""
    if remedy is None:
        return {}
    return {
        f"/what_would_fit/memory_needed/{name}": _entry(
            "analytic", value * (1 - _FORMULA_SPREAD), value * 1.1
        )
        for name, value in remedy["memory_needed"].items()
    }
