"""What the sweeps over two hosts recommend at each rate, measured and by the fitted cost model.

The rows of a rate have a fingerprint of their own. They are fitted by themselves, around stated figures, and a plan
of a small model on two such hosts then takes c, K_max, schedule and ring mode from them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.netns import rate_of
from cost_model.calibration import fit
from cost_model.calibration_fit import log_errors
from cost_model.cluster_spec import ClusterSpec, Figure, GpuSpec, HostSpec, LinkTier
from cost_model.model_spec import AttentionSpec, ModelSpec
from cost_model.rates import CostModel, RateView
from cost_model.rates_default import default_cost_model
from cost_model.sample_formulas import sample_seconds
from cost_model.samples import Observation, observations
from cost_model.workload import Workload
from tuner.planning.plan import PlanOptions
from tuner.planning.planner import make_plan
from tuner.routing.rows import with_routing
from tuner.rows.measured import MeasuredFronts

FOLDER = Path(__file__).parent / "results" / "two-hosts"
CREATED = "2026-01-01T00:00:00Z"
TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, VOCAB = 1024, 256, 1024, 8, 2, 8192
SHAPES: dict[str, dict[str, Any]] = {
    "pipelined_llep": {
        "tokens_per_rank": TOKENS,
        "hidden": HIDDEN,
        "intermediate": INTERMEDIATE,
        "experts": EXPERTS,
        "top_k": TOP_K,
        "profile": "random",
    },
    "ring_dtp": {"tokens_per_rank": TOKENS, "hidden": HIDDEN, "vocab": VOCAB},
}
OPERATORS = tuple(SHAPES)
_LINKS = ("all_to_all_cluster_bytes_per_s", "ring_cluster_bytes_per_s")
_KNOBS = {"pipelined_llep": ("chunks", "dispatch_schedule"), "ring_dtp": ("ring_mode", "strip_rows")}


@dataclass(frozen=True, slots=True)
class Recommended:
    """The fastest point of one operator: as measured, and by the model fitted to the same rows.

    ``by_knob`` is what the best point of every value of the first knob takes, as measured.
    """

    measured: dict[str, Any]
    measured_s: float
    modelled: dict[str, Any]
    modelled_s: float
    by_knob: dict[Any, float]
    median_error: float
    """Of the fit over all points: median of abs(log(predicted / measured))."""


@dataclass(frozen=True, slots=True)
class AtRate:
    """What one rate's rows say."""

    rate: str
    hardware_id: str
    recommended: dict[str, Recommended]
    launch: dict[str, Any]
    """Of the plan from measured points: ``chunk_tokens``, ``max_chunks``, ``dispatch_schedule``, ``ring_mode``,
    ``strip_rows``."""
    fitted_launch: dict[str, Any]
    """The same of the plan from the fitted cost model alone, over every K and both directions of travel."""
    network_bytes_per_s: dict[str, float]
    """Fitted rates of the network tier."""
    cost: CostModel
    rows: tuple[Observation, ...]


def two_hosts(rate: str) -> ClusterSpec:
    """Two such hosts, one rank each, in figures that are stated: the prior of the fit and the plan's cluster."""

    def stated(value: float) -> Figure:
        return Figure(value, "stated")

    return ClusterSpec(
        name=f"two-hosts-{rate}",
        nodes=2,
        gpus_per_node=1,
        gpu=GpuSpec(
            name="processor",
            device="cpu",
            compute_capability="x86_64",
            sm_count=2,
            hbm_bytes=stated(8 * 2.0**30),
            peak_flops=stated(5e10),
            hbm_bandwidth_bytes_per_s=stated(1e10),
        ),
        host=HostSpec(
            ram_bytes=stated(16 * 2.0**30),
            cores=2,
            cpu_name="processor",
            link_bytes_per_s=((1, stated(5e9)),),
            cpu_adam_params_per_s=stated(1e8),
        ),
        tiers=(
            LinkTier("node", "loopback", stated(1e-4), stated(2e9)),
            LinkTier("cluster", f"tbf-{rate}", stated(2e-4), stated(rate_of(rate) / 8)),
        ),
        outside_allocator_bytes=stated(0.25 * 2**30),
    )


def small_model() -> ModelSpec:
    """A model whose MoE layer and head are the ones that were swept."""
    return ModelSpec(
        name="two-hosts",
        family="mixture",
        hidden=HIDDEN,
        layers=4,
        vocab=VOCAB,
        attention=AttentionSpec(kind="gqa", heads=8, kv_heads=4, head_dim=32, v_head_dim=32),
        experts=EXPERTS,
        top_k=TOP_K,
        expert_intermediate=INTERMEDIATE,
        moe_layers=4,
    )


def at_rate(rate: str, samples: pd.DataFrame) -> AtRate:
    """The recommendations that one rate's samples carry."""
    (hardware_id,) = samples["hardware_id"].unique()
    cluster = two_hosts(rate)
    samples = with_routing(samples).assign(hardware_id=cluster.hardware_id)
    cost = fit(samples, default_cost_model(cluster), created=CREATED).cost_model
    found, _ = observations(samples, cluster.hardware_id)
    recommended = {
        name: _recommended([one for one in found if one.operator == name], cost) for name in OPERATORS
    }
    return AtRate(
        rate,
        str(hardware_id),
        recommended,
        _launch(cluster, cost, MeasuredFronts.of(samples, cluster.hardware_id)),
        _launch(cluster, cost, None),
        {name: cost.rates[name].value for name in _LINKS},
        cost,
        tuple(found),
    )


def _launch(cluster: ClusterSpec, cost: CostModel, measured: MeasuredFronts | None) -> dict[str, Any]:
    pins = {"expert_degree": 2, "vocab_degree": 2, "max_tokens_per_rank": TOKENS}
    work = Workload(2 * TOKENS, 2 * TOKENS, imbalance=1.0, activation_bytes=4)
    options = PlanOptions(measured=measured, fixed=pins, alternatives=0)
    launch = make_plan(small_model(), cluster, work, cost, options).launch
    keys = ("chunk_tokens", "max_chunks", "dispatch_schedule", "ring_mode", "strip_rows")
    return {key: getattr(launch, key) for key in keys}


def carried(there: AtRate, here: AtRate) -> dict[str, dict[str, Any]]:
    """What the model fitted at one rate recommends at another, told only the ratio of the two rates."""
    ratio = rate_of(here.rate) / rate_of(there.rate)
    rates = {
        name: replace(rate, value=rate.value * ratio, low=rate.low * ratio, high=rate.high * ratio)
        for name, rate in there.cost.rates.items()
        if name in _LINKS
    }
    view = RateView({**there.cost.rates, **rates}, None, there.cost.scales)
    return {
        name: _fastest(_modelled([one for one in here.rows if one.operator == name], view))
        for name in OPERATORS
    }


def _recommended(rows: Sequence[Observation], cost: CostModel) -> Recommended:
    measured: dict[str, float] = {}
    for row in rows:
        measured[_point(row)] = measured.get(_point(row), 0.0) + row.seconds
    modelled = _modelled(rows, RateView(cost.rates, None, cost.scales))
    by_knob: dict[Any, float] = {}
    for point, seconds in measured.items():
        value = next(iter(json.loads(point).values()))
        by_knob[value] = min(seconds, by_knob.get(value, seconds))
    errors = pd.Series(log_errors(cost.rates, cost.scales, rows)).abs()
    return Recommended(
        _fastest(measured),
        min(measured.values()),
        _fastest(modelled),
        min(modelled.values()),
        dict(sorted(by_knob.items())),
        float(errors.median()),
    )


def _point(row: Observation) -> str:
    return json.dumps({knob: row.values[knob] for knob in _KNOBS[row.operator]})


def _modelled(rows: Sequence[Observation], view: RateView) -> dict[str, float]:
    """Seconds of every point, both passes, by the model."""
    found: dict[str, float] = {}
    for row in rows:
        seconds = sample_seconds(view, row.operator, row.values, row.pass_name)
        found[_point(row)] = found.get(_point(row), 0.0) + seconds
    return found


def _fastest(points: dict[str, float]) -> dict[str, Any]:
    best: dict[str, Any] = json.loads(min(points, key=points.__getitem__))
    return best


def read(folder: Path, rate: str) -> pd.DataFrame:
    """The rows that are kept of one rate."""
    return pd.read_csv(folder / f"{rate}.csv.gz")


def report(folder: Path, rates: Sequence[str]) -> str:
    """Both operators at every rate as Markdown tables."""
    found = [at_rate(rate, read(folder, rate)) for rate in rates]
    heads = ("rate", "fingerprint", "plan from points: c, K_max, schedule", "ring mode, strip rows")
    lines = ["| " + " | ".join((*heads, "plan from the fit: c, K_max, schedule", "links fitted")) + " |"]
    lines.append("|---" * (len(heads) + 2) + "|")
    for one in found:
        launch, fitted = one.launch, one.fitted_launch
        speeds = ", ".join(f"{value / 1e6:.0f} MB/s" for value in one.network_bytes_per_s.values())
        lines.append(
            f"| {one.rate} | `{one.hardware_id}` | {launch['chunk_tokens']}, {launch['max_chunks']}, "
            f"{launch['dispatch_schedule']} | {launch['ring_mode']}, {launch['strip_rows']} | "
            f"{fitted['chunk_tokens']}, {fitted['max_chunks']}, {fitted['dispatch_schedule']} | {speeds} |"
        )
    for name in OPERATORS:
        knobs = list(found[0].recommended[name].by_knob)
        columns = [*map(str, knobs), "fastest", "by the fit", "error"]
        columns += [f"by the fit at {one.rate}" for one in found]
        lines += ["", f"| {name} | " + " | ".join(columns) + " |"]
        lines.append("|---" * (len(columns) + 1) + "|")
        for one in found:
            said = one.recommended[name]
            cells = [f"{said.by_knob[knob] * 1e3:.0f} ms" for knob in knobs]
            cells += [_words(said.measured), _words(said.modelled), f"{said.median_error:.1%}"]
            cells += ["" if there is one else _words(carried(there, one)[name]) for there in found]
            lines.append(f"| {one.rate} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _words(config: dict[str, Any]) -> str:
    return ", ".join(str(value) for value in config.values())
