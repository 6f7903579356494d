"""The runs of the paper's component tables, its printed figures, and what our model predicts for each.

    python -m benchmarks.paper_cases          # recompute benchmarks/predictions/paper_tables.json
    python -m benchmarks.paper_cases --freeze # and the model it comes from, from the rows of one and two GPUs

Predictions come from benchmarks/predictions/cost_model.json, which is frozen before anything is run on eight GPUs:
the model of two GPUs, refitted to their rows, with eight times one card's cores. Two cards do not tell how eight
share their node's memory; the host link with eight active is what the paper's own optimizer step comes to.
Memory is the closed-form bound of each operator (an upper bound: the measured peak must not exceed it); seconds
are the latency model's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from cost_model.bounds.pipelined_llep import pipelined_llep_terms
from cost_model.bounds.ring_dtp import materialised_head_bytes
from cost_model.calibration import fit
from cost_model.latency import GroupLinks, dense_seconds
from cost_model.latency_dispatch import DispatchShape, dispatch_seconds
from cost_model.rates import CostModel, Rate, content_id
from cost_model.sample_formulas import sample_seconds
from tuner.registry import load_adapter
from tuner.routing.load import dispatch_load
from tuner.routing.numbers import profile_loads, routing_numbers

TWO_GPU_ROWS = Path(__file__).parent / "results" / "nvidia-h200-x2" / "samples_first.csv"
# 12 bytes a parameter each way, 2.61e9 parameters a rank, 1.93 s: what the paper's step comes to.
HOST_LINK = 16.2e9
CREATED = "2026-11-29T00:00:00Z"
FOLDER = Path(__file__).parent / "predictions"
GIB = 2**30
RANKS = 8
BOUNDARY = 69_632 * 2880 * 2
Json = dict[str, Any]

DISPATCH: Json = {"tokens_per_rank": 65_536, "hidden": 7168, "intermediate": 2048, "experts": 128, "top_k": 8}
DISPATCH |= {"dtype": "bfloat16"}
STACK = {
    "tokens_per_rank": 69_632,
    "hidden": 2880,
    "intermediate": 11_520,
    "boundaries": 47,
    "dtype": "bfloat16",
}
PARAMS = 2_610_000_000

# Printed in the paper, 8 x H200 (arXiv 2609.14306): GiB a rank and seconds. Forward and backward peak alike.
PAPER: dict[str, Json] = {
    "dispatch balanced llep": {"forward_gib": 52.66, "forward_s": 0.1778},
    "dispatch balanced flatpeak K=10 overlap": {"forward_gib": 21.43, "forward_s": 0.1610},
    "dispatch skew:80/16 llep": {"forward_gib": 52.99, "forward_s": 0.1891},
    "dispatch skew:80/16 flatpeak K=10 overlap": {"forward_gib": 22.86, "forward_s": 0.1803},
    "head 16384 materialised float32": {"peak_gib": 42.462},
    "head 16384 flatpeak float32": {"peak_gib": 7.322, "over_materialised": 1.051},
    "head 32768 materialised float32": {"peak_gib": 79.521},
    "head 32768 flatpeak float32": {"peak_gib": 10.622, "over_materialised": 1.044},
    # peaks of a whole training step of gpt-oss-20b: what compares is how far they fall
    "boundaries 21 of 47": {"fall_gib": 139.790 - 133.546},
    "boundaries 46 of 47": {"fall_gib": 139.790 - 123.728},
    "optimizer stream 100M x 2": {"step_s": 1.93, "staging_gib": 4.234},
    "optimizer stream 100M x 3": {"step_s": 1.951},
    "optimizer host": {"step_s": 3.95},
}


@dataclass(frozen=True)
class Case:
    """One run: an operator's provider at one shape and one launch, on every rank."""

    id: str
    operator: str
    provider: str
    shape: Json
    config: Json = field(default_factory=dict)
    warmups: int = 2
    repeats: int = 5


def cases() -> list[Case]:
    """Every run, in its order: dispatch, head, boundaries, optimizer."""
    found: list[Case] = []
    for profile in ("balanced", "skew:30/16", "skew:50/16", "skew:80/16"):
        shape = DISPATCH | {"profile": profile}
        found += [
            Case(f"dispatch {profile} {provider}", "pipelined_llep", provider, shape)
            for provider in ("standard_ep", "llep")
        ]
        for schedule in ("serial", "overlap"):
            config = {"chunks": 10, "dispatch_schedule": schedule}
            name = f"dispatch {profile} flatpeak K=10 {schedule}"
            found.append(Case(name, "pipelined_llep", "flatpeak", shape, config))
    nested = Case(
        "dispatch balanced nested K=10",
        "pipelined_llep",
        "nested",
        DISPATCH | {"profile": "balanced"},
        {"chunks": 10},
    )
    found.append(nested)
    for dtype in ("bfloat16", "float32"):
        for tokens in (16_384, 32_768):
            head = {"tokens_per_rank": tokens, "hidden": 7168, "vocab": 200_000, "dtype": dtype}
            knobs = {"ring_mode": "auto", "strip_rows": 4096}
            few = {"warmups": 1, "repeats": 2 if dtype == "float32" else 5}  # fp32 takes seconds
            found += [
                Case(f"head {tokens} materialised {dtype}", "ring_dtp", "materialised", head, {}, **few),
                Case(f"head {tokens} flatpeak {dtype}", "ring_dtp", "flatpeak", head, knobs, **few),
            ]
    for count in (0, 21, 46):
        config = {"host_budget_bytes": count * BOUNDARY}
        name = f"boundaries {count} of 47"
        found.append(Case(name, "checkpoint_offload", "flatpeak", STACK, config, 1, 2))
    step = {"params": PARAMS, "dtype": "bfloat16"}
    for millions, slots in ((100, 2), (100, 3), (5, 3)):
        config = {"engine": "stream", "bucket_params": millions * 1_000_000, "staging_slots": slots}
        name = f"optimizer stream {millions}M x {slots}"
        found.append(Case(name, "stream_adamw", "flatpeak", step, config, 1, 3))
    host = {"engine": "host", "bucket_params": 10_000_000, "staging_slots": 3}
    found.append(Case("optimizer host", "stream_adamw", "flatpeak", step, host, 1, 3))
    return found


def eight_gpu_model() -> CostModel:
    """The model of two cards, fitted to their rows, for a node of eight."""
    from benchmarks.two_gpus_errors import joined_model
    from tuner.routing.rows import with_routing

    samples = pd.read_csv(TWO_GPU_ROWS)
    hardware_id = str(samples["hardware_id"].iloc[0])
    two = fit(with_routing(samples), joined_model(hardware_id), created=CREATED).cost_model
    rates = dict(two.rates)
    shared = Rate(
        HOST_LINK, HOST_LINK / 2, HOST_LINK * 2, "analytic", "B/s", "from a published step of 8 GPUs"
    )
    rates[f"host_link_{RANKS}_bytes_per_s"] = shared
    cores, more = rates["adam_host_params_per_s"], RANKS / 2
    rates["adam_host_params_per_s"] = replace(
        cores, value=more * cores.value, low=more * cores.low, high=more * cores.high
    ).widened(0.3, "transferred", f"{more:g} times two cards' cores")
    body = replace(two, rates=rates, hardware_id="nvidia-h200-x8", parent_id=two.id, created=CREATED, id="")
    return replace(body, id=content_id(body))


def frozen_model() -> CostModel:
    """The model that predictions come from."""
    return CostModel.from_json(json.loads((FOLDER / "cost_model.json").read_text(encoding="utf-8")))


def predicted(case: Case, cost: CostModel, ranks: int = RANKS) -> Json:
    """``forward_s``, ``backward_s`` or ``step_s``; ``forward_gib`` (dispatch) and ``peak_gib``, bounds."""
    adapter = load_adapter(case.operator)
    shape = adapter.shape(case.shape, ranks)
    config = adapter.canonical(shape, case.config, ranks)
    bound = adapter.bound_bytes(shape, config, ranks, case.provider)
    found: Json = {"peak_gib": sum(bound.values()) / GIB}
    if case.operator == "pipelined_llep":
        found["forward_gib"] = _forward_bytes(shape, config, bound, case, ranks) / GIB
        found |= _dispatch_seconds(cost, case, shape, config, ranks)
    elif case.provider == "materialised":
        scalar = 4
        peak = materialised_head_bytes(
            tokens=shape["tokens_per_rank"],
            hidden=shape["hidden"],
            vocab=shape["vocab"],
            scalar_bytes=scalar,
        )
        found = {"peak_gib": peak / GIB} if shape["dtype"] == "float32" else found
        found |= _materialised_seconds(cost, shape)
    elif case.operator == "stream_adamw":
        found |= _seconds(cost, case.operator, shape | {"ranks": ranks}, config, ("step",))
        found["staging_gib"] = bound.get("optimizer_staging", 0) / GIB
    else:
        found |= _seconds(cost, case.operator, shape | {"ranks": ranks}, config)
    return found


def _seconds(
    cost: CostModel,
    operator: str,
    shape: Mapping[str, Any],
    config: Mapping[str, Any],
    passes: tuple[str, ...] = ("forward", "backward"),
) -> Json:
    if shape.get("dtype") == "float32" and operator == "ring_dtp":
        return {}  # the model's matmul rates are those of bf16
    scalar = {"bfloat16": 2, "float32": 4}[str(shape["dtype"])]
    values = {**shape, **config, "scalar_bytes": scalar}
    view = cost.view()
    return {f"{name}_s": sample_seconds(view, operator, values, name) for name in passes}


def _materialised_seconds(cost: CostModel, shape: Mapping[str, Any]) -> Json:
    """One matmul over the whole vocabulary forward, two backward; the softmax walks fp32 logits twice as often."""
    if shape["dtype"] == "float32":
        return {}
    view = cost.view()
    logits = float(shape["tokens_per_rank"]) * shape["vocab"]
    matmul = float(dense_seconds(view, 2.0 * logits * shape["hidden"]))
    walks = 2.0 * view["strip_passes"] * 4.0 * logits / view["hbm_bytes_per_s"]
    return {"forward_s": matmul + walks, "backward_s": 2.0 * matmul + walks}


def _forward_bytes(
    shape: Mapping[str, Any], config: Mapping[str, Any], bound: Mapping[str, int], case: Case, ranks: int
) -> int:
    """The bound of forward alone: the operator's terms of that pass beside what is held all the time."""
    chunks = int(config.get("chunks", 1))
    load = dispatch_load(
        profile=shape["profile"],
        tokens=shape["tokens_per_rank"],
        experts=shape["experts"],
        top_k=shape["top_k"],
        ranks=ranks,
        chunks=chunks,
        min_rows=shape["min_rows"],
        migrate=case.provider != "standard_ep",
    )
    terms = pipelined_llep_terms(
        tokens=shape["tokens_per_rank"],
        hidden=shape["hidden"],
        intermediate=shape["intermediate"],
        experts=shape["experts"],
        top_k=shape["top_k"],
        expert_ranks=ranks,
        chunks=chunks,
        schedule=str(config.get("dispatch_schedule", "serial")),
        pass_="forward",
        rows_per_chunk=load.rows_per_chunk,
        migrated_experts=load.migrated_experts,
    )
    # no weight gradients yet; nested keeps every chunk's rows from forward on
    held = bound["weights_grads"] // 2 + bound["routing"] + bound.get("boundaries_resident", 0)
    return sum(terms.values()) + held


def _dispatch_seconds(
    cost: CostModel, case: Case, shape: Mapping[str, Any], config: Mapping[str, Any], ranks: int
) -> Json:
    loads = profile_loads(shape["profile"], shape["tokens_per_rank"], shape["experts"], shape["top_k"])
    never = float("inf") if case.provider == "standard_ep" else 1.3
    routing = routing_numbers(loads, ranks, min_rows=shape["min_rows"], switch=never)
    layer = DispatchShape(
        tokens=shape["tokens_per_rank"],
        hidden=shape["hidden"],
        intermediate=shape["intermediate"],
        experts=shape["experts"],
        top_k=shape["top_k"],
        expert_ranks=ranks,
        imbalance=routing.balanced_imbalance,
        send_ratio=routing.send_ratio,
        migrated_experts=routing.migrated_experts,
    )
    links = GroupLinks(ranks, (ranks - 1) / ranks, 0.0)
    chunks, schedule = int(config.get("chunks", 1)), str(config.get("dispatch_schedule", "serial"))
    view = cost.view()
    found: Json = {}
    for name, backward in (("forward", False), ("backward", True)):
        seconds = dispatch_seconds(view, layer, links, float(chunks), schedule=schedule, backward=backward)
        found[f"{name}_s"] = float(seconds) * view.scale(f"pipelined_llep:{name}")
    if case.provider == "nested":
        # the layer's checkpoint runs forward again before each chunk's own does
        found["backward_s"] += found["forward_s"]
    return found


def predictions(cost: CostModel) -> Json:
    """Every case's prediction beside the paper's figures, as the committed file holds it."""
    rows: Json = {}
    for case in cases():
        rows[case.id] = {
            "operator": case.operator,
            "provider": case.provider,
            "shape": case.shape,
            "config": case.config,
            "predicted": predicted(case, cost),
            "paper": PAPER.get(case.id, {}),
        }
    _compare(rows)
    return {"cost_model_id": cost.id, "ranks": RANKS, "cases": rows}


def _compare(rows: Json) -> None:
    """Figures that stand for a pair of runs: how far the peak falls, how much slower the shared head is."""
    keep = rows["boundaries 0 of 47"]["predicted"]["peak_gib"]
    for count in (21, 46):
        own = rows[f"boundaries {count} of 47"]["predicted"]
        own["fall_gib"] = keep - own["peak_gib"]
    for tokens in (16_384, 32_768):
        whole = rows[f"head {tokens} materialised bfloat16"]["predicted"]
        own = rows[f"head {tokens} flatpeak bfloat16"]["predicted"]
        total = own["forward_s"] + own["backward_s"]
        own["over_materialised"] = total / (whole["forward_s"] + whole["backward_s"])


def main() -> int:
    """Write the predictions, and with ``--freeze`` first the model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--freeze", action="store_true", help="fit the model anew and freeze it")
    if parser.parse_args().freeze:
        model = json.dumps(eight_gpu_model().to_json(), indent=1) + "\n"
        (FOLDER / "cost_model.json").write_text(model, encoding="utf-8")
    text = json.dumps(predictions(frozen_model()), indent=1) + "\n"
    (FOLDER / "paper_tables.json").write_text(text, encoding="utf-8")
    print(FOLDER / "paper_tables.json")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
