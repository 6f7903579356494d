"""Options of each operator over its own knobs: bytes it adds to every phase, host bytes, seconds.

The memory model is asked with one operator's knobs changed at a time; its phases are sums of terms of which each
belongs to one operator, so differences add up (a test holds this against the whole model).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_model.bounds.checkpoint_offload import locked_bytes
from cost_model.cluster_spec import ClusterSpec
from cost_model.launch import LaunchConfig
from cost_model.memory import host_terms, live_sets
from cost_model.memory_live import totals
from cost_model.memory_types import PHASE_NAMES, Mode
from cost_model.model_spec import ModelSpec
from cost_model.rates import RateView
from cost_model.step_shape import Segment, StepShape
from cost_model.workload import Workload
from tuner.rows.measured import MeasuredFronts

Floats = npt.NDArray[np.float64]
Knobs = dict[str, Any]
Memory = Callable[[LaunchConfig], tuple[Floats, float]]
"""Launch to (bytes of each phase in the order of PHASE_NAMES, host bytes of a node without CPU ranks' own)."""

BUCKETS = (1_000_000, 2_500_000, 5_000_000, 10_000_000, 20_000_000, 50_000_000, 100_000_000)
SLOTS = (2, 3, 4)
HOST_SHARES = (0.15, 0.25, 0.35, 0.5, 0.65)
ENGINES = ("device", "stream", "host", "split")
SCHEDULES = ("serial", "prefetch", "overlap")
_SMALLEST_STRIP = 128


@dataclass(frozen=True, slots=True)
class Front:
    """Options of one operator: knobs, bytes per phase [options, phases], host bytes of a node, seconds."""

    knobs: list[Knobs]
    phases: Floats
    host: Floats
    seconds: Floats

    def __len__(self) -> int:
        return len(self.knobs)

    def take(self, index: Sequence[int]) -> Front:
        """The options at ``index``."""
        order = list(index)
        return Front(
            [self.knobs[i] for i in order], self.phases[order], self.host[order], self.seconds[order]
        )


@dataclass(frozen=True, slots=True)
class Grid:
    """The knob values that are searched; ``lean`` asks only whether anything fits."""

    lean: bool = False

    def chunk_counts(self, tokens: int, max_chunk_tokens: int | None, fixed: Mapping[str, Any]) -> list[int]:
        """K in its canonical form, c = ceil(N/K) and ceil(N/c) = K, within the fabric's cap on c."""
        if "max_chunks" in fixed:
            counts = {int(fixed["max_chunks"])}
        elif "chunk_tokens" in fixed:
            counts = {-(-tokens // int(fixed["chunk_tokens"]))}
        elif self.lean:
            counts = {1 << e for e in range(11)}
        else:
            counts = {*range(1, 33), *(round(32 * 2 ** (e / 4)) for e in range(1, 17))}
            if max_chunk_tokens:
                counts.add(-(-tokens // max_chunk_tokens))
        if max_chunk_tokens and self.lean:
            counts.add(-(-tokens // max_chunk_tokens))
        found: set[int] = set()
        for count in counts:
            chunk = -(-tokens // min(max(1, count), tokens))
            if max_chunk_tokens and chunk > max_chunk_tokens:
                continue
            found.add(-(-tokens // chunk))
        return sorted(found)

    def strip_rows(self, tokens: int, fixed: Mapping[str, Any]) -> list[int]:
        """Tile heights: powers of two below N, and N."""
        if "strip_rows" in fixed:
            return [min(int(fixed["strip_rows"]), tokens)]
        if self.lean:
            return sorted({min(_SMALLEST_STRIP, tokens)})
        rows, found = _SMALLEST_STRIP, {tokens}
        while rows < tokens:
            found.add(rows)
            rows *= 2
        return sorted(found)


@functools.lru_cache(maxsize=1)
def _no_measurements() -> MeasuredFronts:
    return MeasuredFronts({})


def memory_of(model: ModelSpec, cluster: ClusterSpec, workload: Workload, mode: Mode) -> Memory:
    """The memory model of one case, as the fronts ask it."""

    def evaluate(launch: LaunchConfig) -> tuple[Floats, float]:
        live = totals(live_sets(model, cluster, workload, launch, mode))
        host = host_terms(model=model, cluster=cluster, workload=workload, launch=launch)
        return np.array([float(live.get(name, 0)) for name in PHASE_NAMES]), float(sum(host.values()))

    return evaluate


def _front(
    memory: Memory, base: LaunchConfig, knobs: list[Knobs], seconds: Floats, origin: tuple[Floats, float]
) -> Front:
    phases, host = [], []
    for knob in knobs:
        live, locked = memory(replace(base, **knob))
        phases.append(live - origin[0])
        host.append(locked - origin[1])
    return Front(knobs, np.array(phases), np.array(host), seconds)


def pareto(front: Front, *, by_seconds: bool = True) -> Front:
    """The options no other one beats or equals in every phase, the host and the seconds (first one on a tie)."""
    columns = [front.phases, front.host[:, None]]
    if by_seconds:
        columns.append(front.seconds.reshape(len(front), -1))
    table = np.concatenate(columns, axis=1)
    table = table[:, np.ptp(table, axis=0) > 0] if len(front) > 1 else table
    if table.shape[1] == 0:
        return front.take([0])
    order = np.lexsort(table.T[::-1])
    kept: list[int] = []
    for index in order:
        if kept and bool(np.any(np.all(table[kept] <= table[index], axis=1))):
            continue
        kept.append(int(index))
    return front.take(sorted(kept))


def dispatch_front(
    shape: StepShape,
    rates: RateView | None,
    memory: Memory,
    base: LaunchConfig,
    origin: tuple[Floats, float],
    *,
    grid: Grid,
    fixed: Mapping[str, Any],
    measured: MeasuredFronts | None = None,
) -> Front:
    """PipelinedLLEP over (K, schedule); ``seconds`` holds (forward, backward) of ONE MoE segment."""
    counts = grid.chunk_counts(shape.tokens, shape.cluster.max_chunk_tokens, fixed)
    schedules = (fixed["dispatch_schedule"],) if "dispatch_schedule" in fixed else SCHEDULES
    if grid.lean and "dispatch_schedule" not in fixed:
        schedules = ("serial",)
    points = (measured or _no_measurements()).dispatch(shape)
    knobs: list[Knobs] = []
    times: list[tuple[float, float]] = []
    for schedule in schedules:
        if not counts:
            break
        forward = backward = np.zeros(len(counts))
        if rates is not None:
            moe = shape.moe_segment(rates, np.array(counts, dtype=np.float64), schedule)
            forward, backward = np.atleast_1d(moe.forward_s), np.atleast_1d(moe.backward_s)
        for position, count in enumerate(counts):
            if count == 1 and schedule != "serial" and "dispatch_schedule" not in fixed:
                continue
            pair = points.get((count, schedule)) if points else None
            if points and pair is None:
                continue
            knobs.append(
                {
                    "expert_degree": shape.expert_degree,
                    "chunk_tokens": -(-shape.tokens // count),
                    "max_chunks": count,
                    "dispatch_schedule": schedule,
                }
            )
            times.append(pair or (float(forward[position]), float(backward[position])))
    if not knobs:
        empty = np.zeros((0, len(PHASE_NAMES)))
        return Front([], empty, np.zeros(0), np.zeros((0, 2)))
    return pareto(_front(memory, base, knobs, np.array(times), origin), by_seconds=not grid.lean)


def head_front(
    shape: StepShape,
    rates: RateView | None,
    memory: Memory,
    base: LaunchConfig,
    origin: tuple[Floats, float],
    *,
    grid: Grid,
    fixed: Mapping[str, Any],
    measured: MeasuredFronts | None = None,
) -> Front:
    """Ring-DTP over (direction of travel, tile rows); ``seconds`` of a micro-batch, forward and backward."""
    rows = grid.strip_rows(shape.tokens, fixed)
    points = (measured or _no_measurements()).head(shape)
    modes: tuple[str, ...] = ("weights", "activations") if shape.vocab_degree > 1 else ("weights",)
    if shape.vocab_degree > 1 and any(mode == "gather" for mode, _ in points):
        modes += ("gather",)  # a mode of memory for time: offered where it was measured
    if "ring_mode" in fixed:
        modes = (str(fixed["ring_mode"]),)
    knobs: list[Knobs] = []
    times: list[float] = []
    for mode in modes:
        seconds = np.zeros(len(rows))
        if rates is not None:
            seconds = np.atleast_1d(shape.head_s(rates, mode, np.array(rows, dtype=np.float64)))
        for position, height in enumerate(rows):
            point = points.get((mode, height)) if points else None
            if points and point is None:
                continue
            knobs.append({"vocab_degree": shape.vocab_degree, "ring_mode": mode, "strip_rows": height})
            times.append(point if point is not None else float(seconds[position]))
    if not knobs:
        return Front([], np.zeros((0, len(PHASE_NAMES))), np.zeros(0), np.zeros(0))
    return pareto(_front(memory, base, knobs, np.array(times), origin), by_seconds=not grid.lean)


def optimizer_front(
    shape: StepShape,
    rates: RateView | None,
    memory: Memory,
    base: LaunchConfig,
    origin: tuple[Floats, float],
    *,
    grid: Grid,
    fixed: Mapping[str, Any],
    measured: MeasuredFronts | None = None,
) -> Front:
    """The optimizer over (engine, bucket, slots, host share); ``seconds`` of a step."""
    limit = max(1, int(shape.params_per_rank))
    engines: tuple[str, ...] = ENGINES
    if "optimizer_engine" in fixed:
        engines = (str(fixed["optimizer_engine"]),)
    buckets = sorted({min(b, limit) for b in BUCKETS})
    if "bucket_params" in fixed:
        buckets = [int(fixed["bucket_params"])]
    slots = [int(fixed["staging_slots"])] if "staging_slots" in fixed else list(SLOTS)
    shares = [float(fixed["host_share"])] if "host_share" in fixed else list(HOST_SHARES)
    if grid.lean:
        engines = tuple(e for e in engines if e != "split") or engines
        buckets, slots, shares = buckets[:1], slots[:1], shares[:1]
    points = (measured or _no_measurements()).optimizer(shape)
    middle = 10_000_000 if 10_000_000 in buckets else buckets[-1]
    knobs: list[Knobs] = []
    for engine in engines:
        uses_buckets = engine in ("stream", "split")
        for bucket in buckets if uses_buckets else [middle]:
            for slot in slots if uses_buckets else slots[:1]:
                knobs.extend(
                    {
                        "optimizer_engine": engine,
                        "bucket_params": bucket,
                        "staging_slots": slot,
                        "host_share": share,
                    }
                    for share in (shares if engine == "split" else [0.0])
                )
    if points:
        knobs = [dict(zip(_OPTIMIZER_KEYS, key, strict=True)) for key in sorted(points, key=str)]
        knobs = [k for k in knobs if all(fixed.get(name, value) == value for name, value in k.items())]
    if not knobs:
        return Front([], np.zeros((0, len(PHASE_NAMES))), np.zeros(0), np.zeros(0))
    times = [
        points[tuple(k[name] for name in _OPTIMIZER_KEYS)]
        if points
        else 0.0
        if rates is None
        else float(
            shape.optimizer_s(
                rates,
                engine=k["optimizer_engine"],
                bucket_params=float(k["bucket_params"]),
                staging_slots=float(k["staging_slots"]),
                host_share=k["host_share"],
            )
        )
        for k in knobs
    ]
    return pareto(_front(memory, base, knobs, np.array(times), origin), by_seconds=not grid.lean)


_OPTIMIZER_KEYS = ("optimizer_engine", "bucket_params", "staging_slots", "host_share")


def boundary_front(
    shape: StepShape,
    memory: Memory,
    base: LaunchConfig,
    origin: tuple[Floats, float],
    fixed: Mapping[str, Any],
) -> Front:
    """SCO over the number of boundaries on the host, 0 up to all but the last; seconds follow from the blocks."""
    count = shape.model.boundaries
    budgets = [locked_bytes(boundary_bytes=shape.boundary_bytes, offloaded=n) for n in range(count)]
    if "host_budget_bytes" in fixed:
        budgets = [int(fixed["host_budget_bytes"])]
    knobs: list[Knobs] = [{"host_budget_bytes": budget} for budget in budgets]
    return _front(memory, base, knobs, np.zeros(len(knobs)), origin)


def segment_of(shape: StepShape, front: Front) -> Segment:
    """The MoE segment of every dispatch option at once."""
    return Segment(shape.model.moe_layers, front.seconds[:, 0], front.seconds[:, 1])
