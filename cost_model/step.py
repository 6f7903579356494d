"""One training step, term by term (theory section 7)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cost_model.bounds.checkpoint_offload import offloaded_count
from cost_model.cluster_spec import ClusterSpec
from cost_model.coverage import Coverage, coverage
from cost_model.latency import GroupLinks
from cost_model.launch import LaunchConfig
from cost_model.model_spec import ModelSpec
from cost_model.provenance import Estimate
from cost_model.rates import CostModel, RateView
from cost_model.step_shape import StepShape
from cost_model.workload import Workload

TERM_NAMES = (
    "attention",
    "dispatch",
    "head",
    "boundaries_exposed",
    "zero_exposed",
    "gradient_reduce",
    "optimizer",
)
_TERM_OPERATORS = {
    "dispatch": "pipelined_llep",
    "head": "ring_dtp",
    "boundaries_exposed": "checkpoint_offload",
    "optimizer": "stream_adamw",
}


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step of the slowest rank."""

    terms: dict[str, Estimate]
    total: Estimate
    outside: Mapping[str, str] = field(default_factory=dict)
    """Term to what has to be said of it: its shape lies outside what was measured."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user has to be told of the terms."""
        return tuple(self.outside.values())

    def to_json(self) -> dict[str, Any]:
        """Plain figures; provenance is a plan's matter."""
        return {
            "terms": {name: term.value for name, term in self.terms.items()},
            "total_s": self.total.value,
            "interval_s": [self.total.low, self.total.high],
        }


def shape_of(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    launch: LaunchConfig,
    *,
    send_ratio: float | None = None,
) -> StepShape:
    """The step a launch describes."""
    return StepShape(
        model,
        cluster,
        workload,
        launch.sequence_degree,
        launch.expert_degree,
        launch.vocab_degree,
        launch.max_tokens_per_rank,
        launch.accumulation_steps,
        send_ratio,
    )


def offloaded_boundaries(shape: StepShape, host_budget_bytes: int) -> int:
    """|S|: boundaries that the budget holds in whole pages, the last one never."""
    return offloaded_count(
        boundary_bytes=shape.boundary_bytes,
        boundaries=shape.model.boundaries,
        host_budget_bytes=host_budget_bytes,
    )


def term_formulas(shape: StepShape, launch: LaunchConfig) -> dict[str, Callable[[RateView], float]]:
    """Term name to its seconds per optimizer step as a function of the rates."""
    acc = shape.accumulation_steps
    chunks, schedule = float(launch.chunks), launch.dispatch_schedule
    offloaded = offloaded_boundaries(shape, launch.host_budget_bytes)
    return {
        "attention": lambda r: acc * shape.attention_s(r),
        "dispatch": lambda r: float(acc * shape.dispatch_s(r, chunks, schedule)),
        "head": lambda r: float(acc * shape.head_s(r, launch.ring_mode, float(launch.strip_rows))),
        "boundaries_exposed": lambda r: float(
            acc * shape.boundaries_exposed_s(r, shape.moe_segment(r, chunks, schedule), offloaded)
        ),
        "zero_exposed": lambda r: float(
            acc * shape.zero_exposed_s(r, shape.moe_segment(r, chunks, schedule))
        ),
        "gradient_reduce": shape.gradient_reduce_s,
        "optimizer": lambda r: float(
            shape.optimizer_s(
                r,
                engine=launch.optimizer_engine,
                bucket_params=float(launch.bucket_params),
                staging_slots=float(launch.staging_slots),
                host_share=launch.host_share,
            )
        ),
    }


def term_coverage(shape: StepShape, launch: LaunchConfig, cost: CostModel) -> dict[str, Coverage]:
    """Where each operator's shape lies against what was measured."""
    model = shape.model
    values: dict[str, dict[str, float]] = {
        "pipelined_llep": {
            "tokens_per_rank": shape.tokens,
            "hidden": model.hidden,
            "intermediate": model.expert_intermediate,
            "experts": model.experts,
            "top_k": model.top_k,
            "ranks": launch.expert_degree,
            "nodes": GroupLinks.of(shape.cluster, launch.expert_degree).nodes,
            "chunks": launch.chunks,
        },
        "ring_dtp": {
            "tokens_per_rank": shape.tokens,
            "hidden": model.hidden,
            "vocab": model.vocab,
            "ranks": launch.vocab_degree,
            "nodes": GroupLinks.of(shape.cluster, launch.vocab_degree).nodes,
            "strip_rows": launch.strip_rows,
        },
        "checkpoint_offload": {"tokens_per_rank": shape.tokens, "hidden": model.hidden},
        "stream_adamw": {
            "params": shape.params_per_rank,
            "bucket_params": launch.bucket_params,
            "staging_slots": launch.staging_slots,
            "ranks": shape.cluster.gpus_per_node,
        },
    }
    return {term: coverage(cost, operator, values[operator]) for term, operator in _TERM_OPERATORS.items()}


def operator_spread(cost: CostModel, operator: str) -> float:
    """Widest spread of held-out errors among an operator's passes; 0 where it was never fitted."""
    own = (width for key, width in cost.spreads.items() if key.split(":")[0] == operator)
    return max(own, default=0.0)


def step_time(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    launch: LaunchConfig,
    cost: CostModel,
    *,
    send_ratio: float | None = None,
) -> StepTime:
    """Predicted seconds of one optimizer step.

    Terms are disjoint and add up: whatever is hidden behind something else is not in them. A shape outside what
    the cost model was fitted on gets a wider interval, and a warning that says what to measure.

    Args:
        model, cluster, workload, launch: what is trained where, and how it is started.
        cost: rates of this cluster's kind of node (``hardware_id`` equal, or already transferred).
        send_ratio: largest over mean send of the all-to-all, from the routing profile.
    """
    shape = shape_of(model, cluster, workload, launch, send_ratio=send_ratio)
    formulas = term_formulas(shape, launch)
    covers = term_coverage(shape, launch, cost) if cost.coverage else {}
    terms: dict[str, Estimate] = {}
    outside: dict[str, str] = {}
    spread_squares = 0.0
    outside_squares = 0.0
    for name, formula in formulas.items():
        spread = operator_spread(cost, _TERM_OPERATORS.get(name, ""))
        extra = covers[name].extra_log_width if name in covers else 0.0
        source = covers[name].provenance if name in covers else None
        terms[name] = cost.estimate(formula, spread=spread, extra_log_width=extra, provenance=source)
        spread_squares += (terms[name].value * spread) ** 2
        outside_squares += (terms[name].value * extra) ** 2
        if name in covers and not covers[name].covered and terms[name].value > 0:
            outside[name] = covers[name].message
    value = sum(term.value for term in terms.values())
    total = cost.estimate(
        lambda rates: sum(formula(rates) for formula in formulas.values()),
        spread=math.sqrt(spread_squares) / value,
        extra_log_width=math.sqrt(outside_squares) / value,
    )
    return StepTime(terms, total, outside)
