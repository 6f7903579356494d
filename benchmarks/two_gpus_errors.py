"""How far a model of one GPU plus a link model is from what two GPUs do, before and after fitting it to them.

    python -m benchmarks.two_gpus_errors benchmarks/results/nvidia-h200-x2/samples_first.csv

The one-GPU model is fitted to the rows in benchmarks/results/nvidia-h200-x1 (loopback: compute and memory are
true, transfers are local copies). Its compute, launch and memory rates are then joined with the link rates of
two cards that the package ships (cost_model.reference.machines). Nothing of the two-GPU rows goes into it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cost_model.calibration import FitResult, default_cost_model, fit
from cost_model.cluster_spec import ClusterSpec, Figure, LinkTier
from cost_model.rates import CostModel, content_id
from cost_model.reference.machines import ONE_H200, TWO_H200
from cost_model.sample_formulas import sample_seconds
from cost_model.samples import observations
from tuner.routing.rows import with_routing

ONE_GPU_ROWS = Path(__file__).parent / "results" / "nvidia-h200-x1"
# A transfer to oneself is a copy inside the card: read and written at half its memory rate.
_LOOPBACK = LinkTier("node", "loopback", Figure(10e-6, "measured"), Figure(1.9e12, "measured"))
_KNOBS: tuple[str, ...] = (
    "chunks",
    "dispatch_schedule",
    "ring_mode",
    "strip_rows",
    "host_budget_bytes",
    "engine",
    "bucket_params",
)
_KNOBS += ("staging_slots", "host_share", "tokens_per_rank", "profile")
_OF_THE_LINKS = ("all_to_all_", "ring_", "host_link_", "overlap")
Rows = list[dict[str, Any]]


def one_gpu_samples(hardware_id: str, folder: Path = ONE_GPU_ROWS) -> pd.DataFrame:
    """The one-GPU benchmarks' rows in the spelling of sweeps: loopback rank 0 of its group."""
    frames = [pd.read_csv(path) for path in sorted(folder.glob("*.csv"))]
    rows: Rows = []
    for row in pd.concat(frames, ignore_index=True).to_dict("records"):
        if row["provider"] != "flatpeak" or int(row["rank"]) != 0:
            continue
        shape, config = json.loads(row["shape_json"]), json.loads(row["config_json"])
        spelt = _SPELLING.get(str(row["operator"]), _left_out)(shape, config)
        if spelt is None:
            continue
        texts = {
            "shape_json": json.dumps(spelt, sort_keys=True),
            "config_json": json.dumps(config, sort_keys=True),
        }
        rows.append({**{str(k): v for k, v in row.items()}, **texts, "hardware_id": hardware_id})
    return pd.DataFrame(rows)


def _left_out(shape: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    del shape, config


def _dispatch(shape: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any] | None:
    del config
    if shape["profile"] != "balanced":
        return None
    names = ("hidden", "intermediate", "experts", "top_k", "ranks")
    return {"tokens_per_rank": shape["tokens"], "dtype": "bfloat16", **{n: shape[n] for n in names}}


def _head(shape: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any] | None:
    if shape["dtype"] != "bfloat16" or config.get("gradient_hop", "serial") != "serial":
        return None
    return {
        "tokens_per_rank": shape["tokens"],
        "hidden": shape["hidden"],
        "vocab": shape["vocab"],
        "dtype": shape["dtype"],
        "ranks": config["vocab_ranks"],
    }


def _optimizer(shape: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any] | None:
    if "engine" not in config or int(config.get("active_gpus", 1)) != 1:
        return None
    return {"params": shape["params"], "dtype": shape["dtype"], "ranks": 1}


_SPELLING = {"pipelined_llep": _dispatch, "ring_dtp": _head, "stream_adamw": _optimizer}


def one_gpu_fit(folder: Path = ONE_GPU_ROWS) -> FitResult:
    """The model of one H200 fitted to its rows."""
    prior = default_cost_model(replace(ONE_H200, tiers=(_LOOPBACK,)))
    return fit(one_gpu_samples(prior.hardware_id, folder), prior, created="2026-01-01T00:00:00Z")


def joined_model(hardware_id: str, cluster: ClusterSpec = TWO_H200) -> CostModel:
    """One GPU's fitted rates with ``cluster``'s links: what predicts several GPUs before they are measured.

    Corrections by pass come along too; the overlap factor is the link model's.
    """
    alone, links = one_gpu_fit().cost_model, default_cost_model(cluster)
    rates = {
        name: rate if name.startswith(_OF_THE_LINKS) or name not in alone.rates else alone.rates[name]
        for name, rate in links.rates.items()
    }
    cores = rates["adam_host_params_per_s"]  # a node's: every card brings its cores along
    more = cluster.gpus_per_node
    rates["adam_host_params_per_s"] = replace(
        cores, value=more * cores.value, low=more * cores.low, high=more * cores.high
    ).widened(0.3, "transferred", f"{more} times one card's cores")
    body = replace(
        links, rates=rates, scales=alone.scales, hardware_id=hardware_id, parent_id=alone.id, id=""
    )
    return replace(body, id=content_id(body))


def errors(cost: CostModel, samples: pd.DataFrame) -> Rows:
    """Predicted and measured seconds of every configuration and pass of our own operators."""
    found, _ = observations(with_routing(samples), cost.hardware_id)
    view = cost.view()
    rows: Rows = []
    for one in found:
        predicted = sample_seconds(view, one.operator, one.values, one.pass_name)
        rows.append(
            {
                "operator": one.operator,
                "pass": one.pass_name,
                **{key: one.values[key] for key in _KNOBS if key in one.values},
                "predicted_s": predicted,
                "measured_s": one.seconds,
                "log_error": math.log(predicted / one.seconds),
                "slow_share": one.slow_share,
            }
        )
    return rows


def summary(rows: Rows) -> Rows:
    """Median and largest absolute error, and the median signed one, by operator and pass."""
    out: Rows = []
    for key in sorted({(row["operator"], row["pass"]) for row in rows}):
        own = np.array([row["log_error"] for row in rows if (row["operator"], row["pass"]) == key])
        out.append(
            {
                "operator": key[0],
                "pass": key[1],
                "configurations": len(own),
                "median_error": float(np.expm1(np.median(np.abs(own)))),
                "largest_error": float(np.expm1(np.max(np.abs(own)))),
                "bias": float(np.expm1(np.median(own))),
            }
        )
    return out


def evaluate(samples: pd.DataFrame, cluster: ClusterSpec = TWO_H200) -> dict[str, Any]:
    """Errors before any refit, then the refit with its held-out errors. JSON."""
    hardware_id = str(samples["hardware_id"].iloc[0])
    before = joined_model(hardware_id, cluster)
    rows = errors(before, samples)
    fitted = fit(with_routing(samples), before)
    after = errors(fitted.cost_model, samples)
    return {
        "hardware_id": hardware_id,
        "one_gpu_fit": one_gpu_fit().report.to_json(),
        "before": summary(rows),
        "before_rows": rows,
        "refit": fitted.report.to_json(),
        "after": summary(after),
        "after_rows": after,
        "cost_model": fitted.cost_model.to_json(),
    }


def table(found: Mapping[str, Any]) -> list[str]:
    """The evaluation for a reader."""
    head = ("operator", "pass", "configs", "before: median", "largest", "bias", "after: median")
    lines = [
        "{:<20}{:<18}{:>8}{:>16}{:>9}{:>8}{:>15}".format(*head),
    ]
    after = {(row["operator"], row["pass"]): row for row in found["after"]}
    for row in found["before"]:
        then = after[row["operator"], row["pass"]]
        lines.append(
            f"{row['operator']:<20}{row['pass']:<18}{row['configurations']:>8}{row['median_error']:>15.1%} "
            f"{row['largest_error']:>8.1%}{row['bias']:>8.1%}{then['median_error']:>15.1%}"
        )
    lines += [
        f"held out: {one['operator']:<20} {one['held_out']} rows, log error {one['median_error']:.3f} "
        f"(before the refit {one['prior_error']:.3f}), {'promoted' if one['promoted'] else 'not promoted'}"
        for one in found["refit"]["operators"]
    ]
    return lines


def main() -> int:
    """Print the table; with ``--out`` write the whole evaluation as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("samples", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = evaluate(pd.read_csv(options.samples))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(found)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
