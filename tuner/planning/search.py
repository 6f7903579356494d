"""The search: every legal layout, each operator's front, merged under the budgets, best launches first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cost_model.cluster_spec import ClusterSpec
from cost_model.launch import LaunchConfig
from cost_model.memory_types import Mode
from cost_model.model_spec import ModelSpec
from cost_model.rates import CostModel
from cost_model.step import offloaded_boundaries
from cost_model.step_shape import StepShape
from cost_model.workload import Workload
from tuner.planning.fronts import (
    Floats,
    Front,
    Grid,
    Memory,
    boundary_front,
    dispatch_front,
    head_front,
    memory_of,
    optimizer_front,
    segment_of,
)
from tuner.planning.layouts import Batch, batches, expert_degrees, vocab_degrees
from tuner.planning.merge import Budgets, Choice, LayoutCase, best_choice
from tuner.rows.measured import MeasuredFronts


@dataclass(frozen=True, slots=True)
class Problem:
    """What is searched: a case, the mode its verdict rests on, pinned knobs and measured points."""

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    mode: Mode
    fixed: Mapping[str, Any]
    measured: MeasuredFronts | None = None
    send_ratio: float | None = None

    @property
    def budgets(self) -> Budgets:
        """The two budgets of the cluster."""
        cluster = self.cluster
        return Budgets(
            hbm_bytes=cluster.gpu.hbm_bytes.value,
            ram_bytes=cluster.host.ram_bytes.value,
            outside_bytes=cluster.outside_allocator_bytes.value,
            slack_fraction=cluster.allocator_slack_fraction.value,
            ranks_per_node=cluster.gpus_per_node,
            ranks_live_in_ram=cluster.gpu.device == "cpu",
        )

    def shape(self, batch: Batch, expert_degree: int = 1, vocab_degree: int = 1) -> StepShape:
        """The step of one layout."""
        return StepShape(
            self.model,
            self.cluster,
            self.workload,
            batch.sequence_degree,
            expert_degree,
            vocab_degree,
            batch.tokens,
            batch.accumulation_steps,
            self.send_ratio,
        )


def launch_of(knobs: Mapping[str, Any]) -> LaunchConfig:
    """The launch that a choice's knobs spell."""
    return LaunchConfig(**knobs)


def base_launch(batch: Batch, cap: int | None) -> LaunchConfig:
    """Where every operator's differences are taken from: degrees of 1, one chunk, one tile, all boundaries here."""
    chunk = min(batch.tokens, cap or batch.tokens)
    return LaunchConfig(
        sequence_degree=batch.sequence_degree,
        expert_degree=1,
        vocab_degree=1,
        max_tokens_per_rank=batch.tokens,
        accumulation_steps=batch.accumulation_steps,
        chunk_tokens=chunk,
        max_chunks=-(-batch.tokens // chunk),
        dispatch_schedule="serial",
        strip_rows=batch.tokens,
        ring_mode="weights",
        host_budget_bytes=0,
        optimizer_engine="stream",
        bucket_params=1_000_000,
        staging_slots=2,
    )


@dataclass(frozen=True, slots=True)
class _Fronts:
    """Fronts of one N: they do not depend on D."""

    dispatch: dict[int, Front]
    head: dict[int, Front]
    optimizer: Front
    boundaries: Front


def _fronts(problem: Problem, batch: Batch, memory: Memory, grid: Grid, cost: CostModel | None) -> _Fronts:
    world, fixed = problem.cluster.world_size, problem.fixed
    base = base_launch(batch, problem.cluster.max_chunk_tokens)
    origin = memory(base)
    rates = cost.view() if cost is not None else None
    measured = problem.measured
    experts = [d for d in expert_degrees(problem.model, world) if fixed.get("expert_degree", d) == d]
    vocabs = [d for d in vocab_degrees(problem.model, world) if fixed.get("vocab_degree", d) == d]
    dispatch = {
        d: dispatch_front(
            problem.shape(batch, expert_degree=d),
            rates,
            memory,
            base,
            origin,
            grid=grid,
            fixed=fixed,
            measured=measured,
        )
        for d in experts
    }
    head = {
        d: head_front(
            problem.shape(batch, vocab_degree=d),
            rates,
            memory,
            base,
            origin,
            grid=grid,
            fixed=fixed,
            measured=measured,
        )
        for d in vocabs
    }
    optimizer = optimizer_front(
        problem.shape(batch), rates, memory, base, origin, grid=grid, fixed=fixed, measured=measured
    )
    return _Fronts(
        {d: front for d, front in dispatch.items() if len(front)},
        {d: front for d, front in head.items() if len(front)},
        optimizer,
        boundary_front(problem.shape(batch), memory, base, origin, fixed),
    )


def _cases(problem: Problem, grid: Grid, cost: CostModel | None) -> Iterator[LayoutCase]:
    memory = memory_of(problem.model, problem.cluster, problem.workload, problem.mode)
    by_tokens: dict[int, _Fronts] = {}
    found = sorted(
        batches(problem.model, problem.cluster, problem.workload, problem.fixed),
        key=lambda b: (b.tokens, -b.sequence_degree),
    )
    if grid.lean:
        # More sequences at a time only take more memory, and large groups need the least.
        fewest: dict[int, Batch] = {}
        for batch in found:
            fewest.setdefault(batch.sequence_degree, batch)
        found = list(fewest.values())
    for batch in found:
        if batch.tokens not in by_tokens:
            by_tokens[batch.tokens] = _fronts(problem, batch, memory, grid, cost)
        fronts = by_tokens[batch.tokens]
        origin = memory(base_launch(batch, problem.cluster.max_chunk_tokens))
        for expert_degree, dispatch in sorted(fronts.dispatch.items(), reverse=True):
            yield from _layouts(
                problem, batch, expert_degree, dispatch, fronts=fronts, origin=origin, cost=cost
            )


def _layouts(
    problem: Problem,
    batch: Batch,
    expert_degree: int,
    dispatch: Front,
    *,
    fronts: _Fronts,
    origin: tuple[Floats, float],
    cost: CostModel | None,
) -> Iterator[LayoutCase]:
    steps = float(batch.accumulation_steps)
    block: Floats = np.zeros(len(dispatch))
    exposed: Floats = np.zeros((len(dispatch), len(fronts.boundaries)))
    attention = 0.0
    if cost is not None:
        rates, shape = cost.view(), problem.shape(batch, expert_degree)
        moe = segment_of(shape, dispatch)
        block = np.asarray(
            steps * (moe.count * (moe.forward_s + moe.backward_s) + shape.zero_exposed_s(rates, moe))
        )
        counts = np.array(
            [float(offloaded_boundaries(shape, k["host_budget_bytes"])) for k in fronts.boundaries.knobs]
        )
        one = np.asarray(shape.boundaries_exposed_s(rates, moe, 1.0))
        exposed = steps * one[:, None] * counts[None, :]
        attention = steps * shape.attention_s(rates)
    for vocab_degree, head in sorted(fronts.head.items(), reverse=True):
        reduce_s = 0.0
        if cost is not None:
            reduce_s = problem.shape(batch, expert_degree, vocab_degree).gradient_reduce_s(cost.view())
        yield LayoutCase(
            order=(batch.sequence_degree, expert_degree, vocab_degree, batch.tokens),
            base={
                "sequence_degree": batch.sequence_degree,
                "max_tokens_per_rank": batch.tokens,
                "accumulation_steps": batch.accumulation_steps,
            },
            origin=origin,
            dispatch=dispatch,
            head=head,
            optimizer=fronts.optimizer,
            boundaries=fronts.boundaries,
            block_s=block,
            exposed_s=exposed,
            head_s=steps * head.seconds,
            optimizer_s=fronts.optimizer.seconds,
            fixed_s=attention + reduce_s,
        )


def search(problem: Problem, cost: CostModel, keep: int) -> list[Choice]:
    """The ``keep`` best layouts, each with its best launch, best first.

    Layouts are taken by the least time they could possibly need; once ``keep`` of them fit and the next could not
    be faster than the last one kept, the rest cannot change the answer.
    """
    cases = sorted(_cases(problem, Grid(), cost), key=lambda case: (case.fastest_s, case.order))
    found: list[Choice] = []
    for case in cases:
        fitting = [choice for choice in found if choice.verdict == "fits"]
        if len(fitting) >= keep and case.fastest_s > fitting[keep - 1].seconds:
            break
        found = sorted([*found, best_choice(case, problem.budgets)], key=lambda choice: choice.rank)[
            : keep + 1
        ]
    return found[:keep]


def anything_fits(problem: Problem) -> Choice | None:
    """Some launch that fits, or None: memory alone, over a coarse grid that a plan's own grid contains."""
    lean = replace(problem, measured=None)
    for case in _cases(lean, Grid(lean=True), None):
        choice = best_choice(case, problem.budgets)
        if choice.verdict == "fits":
            return choice
    return None
