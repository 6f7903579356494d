"""make_plan: from model, cluster and workload to launch parameters, verdict and reasons."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from cost_model.cluster_spec import ClusterSpec
from cost_model.errors import RuleError
from cost_model.launch import LaunchConfig
from cost_model.memory import MODES, MemoryReport, Mode, memory_report
from cost_model.model_spec import ModelSpec
from cost_model.provenance import Estimate
from cost_model.rates import CostModel
from cost_model.rates_default import cluster_facts, default_cost_model
from cost_model.step import StepTime, shape_of, step_time
from cost_model.topology_remarks import topology_remarks
from cost_model.workload import Workload
from tuner.planning.layouts import batches, check_cluster, no_layout_reason
from tuner.planning.merge import Choice
from tuner.planning.plan import Alternative, Plan, PlanOptions
from tuner.planning.provenance import (
    alternatives_provenance,
    memory_provenance,
    remedy_provenance,
    step_provenance,
)
from tuner.planning.remedies import what_would_fit
from tuner.planning.search import Problem, launch_of, search
from tuner.rows.measured import MeasuredFronts

_PINNABLE = {
    "sequence_degree",
    "expert_degree",
    "vocab_degree",
    "max_tokens_per_rank",
    "accumulation_steps",
    "chunk_tokens",
    "max_chunks",
    "dispatch_schedule",
    "strip_rows",
    "ring_mode",
    "host_budget_bytes",
    "optimizer_engine",
    "bucket_params",
    "staging_slots",
    "host_share",
}
_LAYOUT_PINS = ("sequence_degree", "max_tokens_per_rank", "accumulation_steps")
_MEASURED_SPREAD = 1.1


def with_measured(samples: pd.DataFrame, cluster: ClusterSpec) -> MeasuredFronts:
    """Points of a sweep for ``PlanOptions.measured``; rows of other hardware than ``cluster`` are left out."""
    return MeasuredFronts.of(samples, cluster.hardware_id)


def adapt_cost(cost: CostModel, cluster: ClusterSpec, software: str | None) -> tuple[CostModel, list[str]]:
    """The cost model as it may be used on ``cluster``, with what has to be said about it.

    Rates of another hardware_id are carried over: scaled by datasheet ratios, marked ``transferred``, widened.
    Other software widens them as well. Neither happens in silence.
    """
    notes: list[str] = []
    used = cost
    if cost.hardware_id != cluster.hardware_id:
        used = used.transferred_to(cluster.hardware_id, cluster_facts(cluster))
        # a node measured alone says nothing of a network
        lacking = {n: r for n, r in default_cost_model(cluster).rates.items() if n not in used.rates}
        if lacking:
            used = used.with_rates(lacking)
        notes.append(
            f"Cost model {cost.id} was made for {cost.hardware_id}, this cluster is {cluster.hardware_id}: its rates"
            " are carried over with wide intervals. Run a sweep on this hardware and fit it."
        )
    if software and cost.software and software != cost.software:
        used = used.under_software(software)
        notes.append(
            f"Rates were measured under {cost.software}, the job runs under {software}: intervals widened."
        )
    return used, notes


def make_plan(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    cost: CostModel,
    options: PlanOptions | None = None,
    *,
    fixed: Mapping[str, Any] | None = None,
) -> Plan:
    """The fastest launch that fits, by exact search of the model.

    Every legal (D, E_p, P, N) is merged from its operators' fronts under both budgets. Where nothing fits, the
    fastest launch at risk is returned, and failing that the one nearest to fitting, with what would fit.

    Args:
        model, cluster, workload: what is trained where.
        cost: rates; those of other hardware are carried over, and said so.
        options: see PlanOptions.
        fixed: launch keys to pin, in addition to ``options.fixed``.

    Raises:
        RuleError: no layout is legal, a pin is not one, or a spec is malformed.
    """
    chosen = options or PlanOptions()
    check_cluster(cluster)
    workload.check_model(model.experts)
    pins = {**chosen.fixed, **(fixed or {})}
    _check_pins(pins)
    used, notes = adapt_cost(cost, cluster, chosen.software)
    if chosen.measured is not None and (count := chosen.measured.flagged):
        notes.append(
            f"{count} measured trials of this hardware are left out: others used the machine as they ran"
            " (`flatpeak sweep show` marks them). Where the model misses what they saw, sweep again on a quiet machine."
        )
    problem = Problem(model, cluster, workload, chosen.mode, pins, chosen.measured or None, chosen.send_ratio)
    if next(batches(model, cluster, workload, pins), None) is None:
        free = {key: value for key, value in pins.items() if key not in _LAYOUT_PINS}
        blocked = next(batches(model, cluster, workload, free), None) is not None
        raise RuleError(
            rule="context, batch and ranks must allow a whole number of tokens per rank and of micro-batches",
            value={
                "context_tokens": workload.context_tokens,
                "global_batch_tokens": workload.global_batch_tokens,
                "ranks": cluster.world_size,
                "pinned": pins,
            },
            remedy=f"Release {_pinned_layout(pins)}: without it there are legal layouts."
            if blocked
            else no_layout_reason(model, cluster, workload) + ".",
        )
    choices = search(problem, used, chosen.alternatives + 1)
    if problem.measured and (not choices or choices[0].verdict != "fits"):
        # What was measured does not fit; perhaps something unmeasured does.
        problem = replace(problem, measured=None)
        choices = search(problem, used, chosen.alternatives + 1)
    if not choices:
        raise RuleError(
            rule="at least one launch must obey the fabric's cap on chunk tokens and the pinned knobs",
            value={"max_chunk_tokens": cluster.max_chunk_tokens, "pinned": pins},
            remedy="Release a pin.",
        )
    return _assemble(problem, used, choices, notes, remedies=chosen.remedies, cost_id=cost.id)


def _check_pins(pins: Mapping[str, Any]) -> None:
    unknown = sorted(set(pins) - _PINNABLE)
    if unknown:
        raise RuleError(
            rule="a pinned knob is a launch key",
            value=unknown,
            remedy=f"Pin one of {', '.join(sorted(_PINNABLE))}.",
        )


def _pinned_layout(pins: Mapping[str, Any]) -> str:
    return " or ".join(f"{key}={pins[key]}" for key in _LAYOUT_PINS if key in pins)


def _reports(problem: Problem, launch: LaunchConfig) -> dict[Mode, MemoryReport]:
    return {
        mode: memory_report(problem.model, problem.cluster, problem.workload, launch, mode=mode)
        for mode in MODES
    }


def _assemble(
    problem: Problem,
    cost: CostModel,
    choices: list[Choice],
    notes: list[str],
    *,
    remedies: bool,
    cost_id: str,
) -> Plan:
    launch = launch_of(choices[0].knobs)
    reports = _reports(problem, launch)
    step = _step(problem, launch, cost)
    alternatives = tuple(_alternative(problem, choice, cost) for choice in choices[1:])
    report = reports[problem.mode]
    remedy = None
    if report.verdict == "does_not_fit" and remedies:
        remedy = what_would_fit(problem, report)
    wiring = topology_remarks(problem.cluster, launch)
    messages = [*notes, *step.warnings, *_remarks(problem, launch, reports), *wiring]
    provenance = {
        **memory_provenance(reports, problem.mode, problem.cluster),
        **step_provenance(step),
        **alternatives_provenance(alternatives),
        **remedy_provenance(remedy),
    }
    return Plan(
        model=problem.model,
        cluster=problem.cluster,
        workload=problem.workload,
        mode=problem.mode,
        launch=launch,
        reports=reports,
        step=step,
        alternatives=alternatives,
        what_would_fit=remedy,
        warnings=tuple(messages),
        cost_model_id=cost_id,
        provenance=provenance,
    )


def _alternative(problem: Problem, choice: Choice, cost: CostModel) -> Alternative:
    launch = launch_of(choice.knobs)
    report = memory_report(problem.model, problem.cluster, problem.workload, launch, mode=problem.mode)
    total = _step(problem, launch, cost).total
    return Alternative(report.verdict, launch, total, report.footprint_bytes, report.host_bytes_per_node)


def _step(problem: Problem, launch: LaunchConfig, cost: CostModel) -> StepTime:
    """The step's terms, with measured points in place of modelled ones where the sweep has them."""
    step = step_time(
        problem.model, problem.cluster, problem.workload, launch, cost, send_ratio=problem.send_ratio
    )
    if not problem.measured:
        return step
    shape = shape_of(problem.model, problem.cluster, problem.workload, launch)
    steps = shape.accumulation_steps
    seconds: dict[str, float] = {}
    pair = problem.measured.dispatch(shape).get((launch.chunks, launch.dispatch_schedule))
    if pair:
        seconds["dispatch"] = steps * shape.model.moe_layers * sum(pair)
    head = problem.measured.head(shape).get((launch.ring_mode, launch.strip_rows))
    if head:
        seconds["head"] = steps * head
    knobs = (launch.optimizer_engine, launch.bucket_params, launch.staging_slots, launch.host_share)
    update = problem.measured.optimizer(shape).get(knobs)
    if update:
        seconds["optimizer"] = update
    if not seconds:
        return step
    terms = dict(step.terms)
    for name, value in seconds.items():
        terms[name] = Estimate(value, value / _MEASURED_SPREAD, value * _MEASURED_SPREAD, "measured")
    value = sum(term.value for term in terms.values())
    low = math.sqrt(sum((term.value - term.low) ** 2 for term in terms.values()))
    high = math.sqrt(sum((term.high - term.value) ** 2 for term in terms.values()))
    total = Estimate(value, max(0.0, value - low), value + high, step.total.provenance)
    # a term that was measured needs no word about where the model of it was fitted
    outside = {name: text for name, text in step.outside.items() if name not in seconds}
    return StepTime(terms, total, outside)


def _remarks(problem: Problem, launch: LaunchConfig, reports: Mapping[Mode, MemoryReport]) -> list[str]:
    """What a user should know about the launch beyond its figures."""
    remarks: list[str] = []
    model = problem.model
    kv_heads = model.attention.kv_heads
    if model.attention.kind == "gqa" and launch.sequence_degree > kv_heads:
        remarks.append(
            f"sequence_degree {launch.sequence_degree} exceeds the {kv_heads} key-value heads: each is repeated"
            f" {-(-launch.sequence_degree // kv_heads)} times around attention, and counted so."
        )
    if launch.expert_degree < problem.cluster.world_size:
        remarks.append(
            f"Experts are replicated {problem.cluster.world_size // launch.expert_degree} times (E_p ="
            f" {launch.expert_degree}): their weights and gradients are counted over E_p, not over all ranks."
        )
    if launch.host_budget_bytes == 0 and reports[problem.mode].verdict == "fits":
        remarks.append("Boundary offload: no gain here; the launch fits with all boundaries on the device.")
    other: Mode = "guarantee" if problem.mode == "expected" else "expected"
    if reports[other].verdict != reports[problem.mode].verdict:
        remarks.append(
            f"The verdict rests on {problem.mode} mode; in {other} mode it is"
            f' "{reports[other].verdict.replace("_", " ")}"'
            f" ({reports[other].footprint_bytes / 2**30:.1f} GiB)."
        )
    if model.max_context and problem.workload.context_tokens > model.max_context:
        remarks.append(
            f"The context of {problem.workload.context_tokens} tokens exceeds the model's own {model.max_context}."
        )
    return remarks
