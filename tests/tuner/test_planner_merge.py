"""The merged optimum against trying every launch there is."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cost_model.bounds.checkpoint_offload import locked_bytes
from cost_model.cluster_spec import ClusterSpec, Figure
from cost_model.launch import LaunchConfig
from cost_model.memory import Mode, footprint_bytes, host_terms, live_sets, verdict
from cost_model.memory_live import totals
from cost_model.memory_types import PHASE_NAMES
from cost_model.model_spec import ModelSpec
from cost_model.rates import CostModel, Rate
from cost_model.rates_default import default_cost_model
from cost_model.step import shape_of, term_formulas
from cost_model.workload import Workload
from tests.cost_model.clusters import cpu_cluster, gpu_cluster, small_moe
from tuner.planning.fronts import HOST_SHARES, SCHEDULES, Front, Grid, pareto
from tuner.planning.layouts import batches, expert_degrees, vocab_degrees
from tuner.planning.search import Problem, anything_fits, search

PINS = {"bucket_params": 50_000, "staging_slots": 2}


@dataclass(frozen=True)
class Tried:
    launch: LaunchConfig
    seconds: float
    footprint: int
    host: int


def shaken(cost: CostModel, seed: int) -> CostModel:
    """Rates moved by factors of a few, so that other launches win."""
    generator = np.random.default_rng(seed)
    moved: dict[str, Rate] = {}
    for name, rate in sorted(cost.rates.items()):
        value = rate.value * math.exp(1.5 * float(generator.standard_normal()))
        if rate.unit == "share":
            value = min(0.99, value)
        moved[name] = Rate(value, value, value, "analytic", rate.unit)
    return cost.with_rates(moved)


def every_launch(problem: Problem) -> list[LaunchConfig]:
    """The whole space, spelt out."""
    spec, cluster = problem.model, problem.cluster
    found: list[LaunchConfig] = []
    grid = Grid()
    for batch in batches(spec, cluster, problem.workload, problem.fixed):
        boundary = batch.tokens * spec.hidden * problem.workload.activation_bytes
        chunks = grid.chunk_counts(batch.tokens, cluster.max_chunk_tokens, problem.fixed)
        engines = [
            ("device", 0.0),
            ("stream", 0.0),
            ("host", 1.0),
            *(("split", share) for share in HOST_SHARES),
        ]
        for e, p, k, schedule, mode, height, (engine, share), n in itertools.product(
            expert_degrees(spec, cluster.world_size),
            vocab_degrees(spec, cluster.world_size),
            chunks,
            SCHEDULES,
            ("weights", "activations"),
            grid.strip_rows(batch.tokens, problem.fixed),
            engines,
            range(spec.boundaries),
        ):
            found.append(
                LaunchConfig(
                    sequence_degree=batch.sequence_degree,
                    expert_degree=e,
                    vocab_degree=p,
                    max_tokens_per_rank=batch.tokens,
                    accumulation_steps=batch.accumulation_steps,
                    chunk_tokens=-(-batch.tokens // k),
                    max_chunks=k,
                    dispatch_schedule=schedule,  # type: ignore[arg-type]
                    strip_rows=height,
                    ring_mode=mode,  # type: ignore[arg-type]
                    host_budget_bytes=locked_bytes(boundary_bytes=boundary, offloaded=n),
                    optimizer_engine=engine,  # type: ignore[arg-type]
                    host_share=share,
                    bucket_params=PINS["bucket_params"],
                    staging_slots=PINS["staging_slots"],
                )
            )
    return found


def tried(problem: Problem, cost: CostModel) -> list[Tried]:
    """Every launch with the whole model's seconds and bytes."""
    rates = cost.view()
    results = []
    for launch in every_launch(problem):
        shape = shape_of(problem.model, problem.cluster, problem.workload, launch)
        seconds = sum(formula(rates) for formula in term_formulas(shape, launch).values())
        phases = live_sets(problem.model, problem.cluster, problem.workload, launch, problem.mode)
        footprint = footprint_bytes(max(totals(phases).values()), problem.cluster)
        host = sum(
            host_terms(
                model=problem.model, cluster=problem.cluster, workload=problem.workload, launch=launch
            ).values()
        )
        if problem.cluster.gpu.device == "cpu":
            host += problem.cluster.gpus_per_node * footprint
        results.append(Tried(launch, seconds, footprint, host))
    return results


def with_memory(cluster: ClusterSpec, hbm: float, ram: float) -> ClusterSpec:
    return replace(
        cluster,
        gpu=replace(cluster.gpu, hbm_bytes=Figure(hbm, "stated")),
        host=replace(cluster.host, ram_bytes=Figure(ram, "stated")),
    )


@settings(max_examples=10, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    seed=st.integers(0, 1000),
    on_cpu=st.booleans(),
    tokens=st.sampled_from([4, 6]),
    layers=st.sampled_from([1, 2]),
    device_share=st.floats(0.0, 1.1),
    host_share=st.floats(0.0, 1.1),
    mode=st.sampled_from(["expected", "guarantee"]),
)
def test_merged_optimum_is_the_best_of_every_launch(
    seed: int, on_cpu: bool, tokens: int, layers: int, device_share: float, host_share: float, mode: Mode
) -> None:
    base = cpu_cluster(2) if on_cpu else replace(gpu_cluster(), gpus_per_node=2)
    base = replace(base, outside_allocator_bytes=Figure(1024.0, "stated"))
    spec = replace(small_moe(layers=layers, experts=2, vocab=50, heads=2), top_k=1, hidden=64)
    work = Workload(tokens, 2 * tokens)
    cost = shaken(default_cost_model(base), seed)
    problem = Problem(spec, base, work, mode, PINS)
    space = tried(problem, cost)
    # Budgets between the most frugal and the most lavish launch.
    footprints, hosts = [t.footprint for t in space], [t.host for t in space]
    hbm = (min(footprints) + device_share * (max(footprints) - min(footprints))) / 0.95 + 1
    ram = (min(hosts) + host_share * (max(hosts) - min(hosts))) / 0.9 + 1
    cluster = with_memory(base, hbm, ram)
    problem = replace(problem, cluster=cluster)
    order = ("fits", "at_risk", "does_not_fit")
    best = dict.fromkeys(order, math.inf)
    for t in space:
        name = verdict(t.footprint, int(hbm), t.host, int(ram))
        best[name] = min(best[name], t.seconds)
    expected = next(name for name in order if best[name] < math.inf)
    choice = search(problem, cost, 3)[0]
    assert choice.verdict == expected
    if expected != "does_not_fit":
        assert choice.seconds == pytest.approx(best[expected], rel=1e-9)
    # The coarse grid asks about memory alone; at this size it holds every chunk count.
    assert (anything_fits(problem) is not None) == (expected == "fits")


def _launches(spec: ModelSpec) -> st.SearchStrategy[LaunchConfig]:
    return st.builds(
        LaunchConfig,
        sequence_degree=st.sampled_from([1, 2, 4, 8]),
        expert_degree=st.sampled_from([1, 2, 4, 8]),
        vocab_degree=st.sampled_from([1, 2, 4, 8]),
        max_tokens_per_rank=st.just(4096),
        accumulation_steps=st.just(1),
        chunk_tokens=st.sampled_from([4096, 1024, 100]),
        max_chunks=st.sampled_from([1, 4, 41]),
        dispatch_schedule=st.sampled_from(list(SCHEDULES)),
        strip_rows=st.sampled_from([128, 1000, 4096]),
        ring_mode=st.sampled_from(["weights", "activations"]),
        host_budget_bytes=st.sampled_from([0, 2 << 21, 5 << 21, 1 << 40]),
        optimizer_engine=st.sampled_from(["device", "stream", "host", "split"]),
        bucket_params=st.sampled_from([1000, 1_000_000]),
        staging_slots=st.sampled_from([2, 3]),
        host_share=st.sampled_from([0.0, 0.5]),
    )


_GROUPS: tuple[tuple[str, ...], ...] = (
    ("sequence_degree",),
    ("expert_degree", "chunk_tokens", "max_chunks", "dispatch_schedule"),
    ("vocab_degree", "ring_mode", "strip_rows"),
    ("optimizer_engine", "bucket_params", "staging_slots", "host_share"),
    ("host_budget_bytes",),
)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), mode=st.sampled_from(["expected", "guarantee"]), dense=st.booleans())
def test_each_operators_bytes_add_up(data: st.DataObject, mode: Mode, dense: bool) -> None:
    """What the merge rests on: in every phase, differences of one operator's knobs are independent of the others'."""
    spec = small_moe()
    if dense:
        spec = replace(spec, layers=5, dense_layers=1, dense_intermediate=2048)
    first, second = data.draw(_launches(spec)), data.draw(_launches(spec))
    cluster, work = gpu_cluster(), Workload(4096, 32768)

    def live(launch: LaunchConfig) -> np.ndarray[Any, Any]:
        found = totals(live_sets(spec, cluster, work, launch, mode))
        host = host_terms(model=spec, cluster=cluster, workload=work, launch=launch)
        return np.array([found.get(name, 0) for name in PHASE_NAMES] + [sum(host.values())])

    summed = live(first)
    for group in _GROUPS:
        summed = summed + live(replace(first, **{key: getattr(second, key) for key in group})) - live(first)
    assert summed.tolist() == live(second).tolist()


@settings(max_examples=60, deadline=None)
@given(
    table=st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=30
    )
)
def test_pareto_keeps_an_equal_or_better_option_for_every_one_dropped(
    table: list[tuple[int, int, int]],
) -> None:
    columns = np.array(table, dtype=np.float64)
    knobs: list[dict[str, Any]] = [{"place": i} for i in range(len(table))]
    kept = pareto(Front(knobs, columns[:, :1], columns[:, 1], columns[:, 2]))
    left = np.column_stack([kept.phases, kept.host, kept.seconds])
    for row in columns:
        assert np.any(np.all(left <= row, axis=1))
    for i, one in enumerate(left):
        for j, other in enumerate(left):
            assert i == j or not np.all(other <= one)


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(1, 1 << 20), cap=st.one_of(st.none(), st.integers(1, 1 << 16)), lean=st.booleans())
def test_chunk_counts_are_canonical(tokens: int, cap: int | None, lean: bool) -> None:
    counts = Grid(lean=lean).chunk_counts(tokens, cap, {})
    assert counts or cap is not None
    for count in counts:
        chunk = math.ceil(tokens / count)
        assert math.ceil(tokens / chunk) == count
        assert cap is None or chunk <= cap
    if cap is not None:
        assert min(counts) == math.ceil(tokens / cap) or math.ceil(tokens / min(counts)) <= cap
