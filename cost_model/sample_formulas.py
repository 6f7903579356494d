"""The formula of each operator as a sweep runs it: one rank's share, one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cost_model.bounds.checkpoint_offload import offloaded_count
from cost_model.errors import RuleError
from cost_model.latency import GroupLinks, dense_seconds
from cost_model.latency_dispatch import DispatchShape, dispatch_seconds
from cost_model.latency_head import HeadShape, head_seconds
from cost_model.latency_host import boundary_copy_seconds, exposed_copy_seconds, optimizer_seconds
from cost_model.rates import RateView

_SPLIT = {"forward": (False,), "backward": (True,)}
"""Pass to the directions it runs; any other name (``step``, ``forward_backward``) runs both."""

FITTED: dict[str, tuple[str, ...]] = {
    "pipelined_llep": (
        "gemm_ceiling_flops",
        "gemm_half_rows",
        "expert_t0_s",
        "route_passes",
        "all_to_all_node_alpha_s",
        "all_to_all_node_bytes_per_s",
        "host_chunk_s",
        "plan_sync_s",
        "overlap",
    ),
    "ring_dtp": (
        "dense_flops",
        "strip_passes",
        "tile_s",
        "head_sync_s",
        "ring_node_alpha_s",
        "ring_node_bytes_per_s",
    ),
    "stream_adamw": (
        "adam_device_params_per_s",
        "adam_host_params_per_s",
        "bucket_s",
        "host_copy_alpha_s",
        "copy_overlap",
        "host_duplex",
        "split_overlap",
    ),
    "checkpoint_offload": ("block_matrices", "segment_s", "host_copy_alpha_s", "copy_overlap", "host_duplex"),
}
"""Rates that samples of an operator on one node inform, in the order operators are fitted; host links are added by
name, and so are the links between nodes."""
_COLLECTIVES = {"pipelined_llep": "all_to_all", "ring_dtp": "ring"}


def sample_seconds(rates: RateView, operator: str, values: Mapping[str, Any], pass_name: str) -> float:
    """Seconds of one call of ``operator`` by the model, corrections by ``scale`` included.

    Args:
        values: shape and knobs of the sample, with ``ranks`` and ``scalar_bytes``.
        pass_name: ``forward``, ``backward``, or anything else for both together.

    Raises:
        RuleError: no such operator.
    """
    directions = _SPLIT.get(pass_name, (False, True))
    scale = rates.scale(f"{operator}:{pass_name}")
    if operator == "pipelined_llep":
        return scale * sum(_dispatch(rates, values, backward) for backward in directions)
    if operator == "ring_dtp":
        return scale * sum(_head(rates, values, backward) for backward in directions)
    if operator == "checkpoint_offload":
        return scale * sum(_boundaries(rates, values, backward) for backward in directions)
    if operator == "stream_adamw":
        return scale * float(
            optimizer_seconds(
                rates,
                float(values["params"]),
                engine=str(values.get("engine", "stream")),
                bucket_params=float(values.get("bucket_params", values["params"])),
                staging_slots=float(values.get("staging_slots", 2)),
                host_share=float(values.get("host_share", 0.0)),
                active=_on_a_node(values),
            )
        )
    raise RuleError(
        rule=f"an operator is one of {', '.join(FITTED)}", value=operator, remedy="Use one of these names."
    )


def _links(values: Mapping[str, Any]) -> GroupLinks:
    """Where the rank's bytes go: evenly over ``nodes``, 1 by default; a rank in loopback has a group and no links."""
    ranks = int(values["ranks"])
    if values.get("loopback"):
        return GroupLinks(ranks, 0.0, 0.0)
    inside = _on_a_node(values)
    return GroupLinks(ranks, (inside - 1) / ranks, (ranks - inside) / ranks)


def _on_a_node(values: Mapping[str, Any]) -> int:
    """Ranks of a node, which share its host links and its memory."""
    return int(values["ranks"]) // int(values.get("nodes", 1))


def _dispatch(rates: RateView, values: Mapping[str, Any], backward: bool) -> float:
    ranks = int(values["ranks"])
    tokens = int(values["tokens_per_rank"])
    imbalance = float(values.get("imbalance", 1.0)) if ranks > 1 else 1.0
    shape = DispatchShape(
        tokens=tokens,
        hidden=int(values["hidden"]),
        intermediate=int(values["intermediate"]),
        experts=int(values["experts"]),
        top_k=int(values["top_k"]),
        expert_ranks=ranks,
        scalar_bytes=int(values["scalar_bytes"]),
        imbalance=imbalance,
        send_ratio=float(values.get("send_ratio", imbalance)),
        migrated_experts=int(values.get("migrated_experts", 0)),
    )
    chunk = -(-tokens // max(1, int(values.get("chunks", 1))))
    schedule = str(values.get("dispatch_schedule", "serial"))
    return float(
        dispatch_seconds(
            rates, shape, _links(values), float(-(-tokens // chunk)), schedule=schedule, backward=backward
        )
    )


def _head(rates: RateView, values: Mapping[str, Any], backward: bool) -> float:
    ranks, tokens = int(values["ranks"]), int(values["tokens_per_rank"])
    shape = HeadShape(tokens, int(values["hidden"]), int(values["vocab"]), ranks, int(values["scalar_bytes"]))
    return float(
        head_seconds(
            rates,
            shape,
            _links(values),
            ring_mode=str(values.get("ring_mode", "auto")),
            strip_rows=float(min(tokens, int(values.get("strip_rows") or tokens))),
            backward=backward,
        )
    )


def _boundaries(rates: RateView, values: Mapping[str, Any], backward: bool) -> float:
    tokens, hidden, count = int(values["tokens_per_rank"]), int(values["hidden"]), int(values["boundaries"])
    nbytes = tokens * hidden * int(values["scalar_bytes"])
    budget = int(values.get("host_budget_bytes") or 0)
    offloaded = offloaded_count(boundary_bytes=nbytes, boundaries=count, host_budget_bytes=budget)
    matmuls = rates["block_matrices"] * 2.0 * tokens * hidden * int(values.get("intermediate", hidden))
    block = rates["segment_s"] + float(dense_seconds(rates, matmuls))
    if backward:
        block *= 3.0
    copy = boundary_copy_seconds(rates, float(nbytes), _on_a_node(values))
    return count * block + offloaded * float(exposed_copy_seconds(rates, copy, block))


def fitted_rates(rates: RateView, operator: str, samples: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of the rates to fit, with the links that samples of these values use: tiers, host links by ranks."""
    rows = list(samples)
    names = [name for name in FITTED[operator] if name in rates.names()]
    links = [_links(values) for values in rows]
    if operator in _COLLECTIVES and any(one.cluster_share > 0 for one in links):
        collective = _COLLECTIVES[operator]
        names += [f"{collective}_cluster_alpha_s", f"{collective}_cluster_bytes_per_s"]
        if not any(one.node_share > 0 for one in links):  # one rank a node: nothing is known inside
            names = [name for name in names if not name.startswith(f"{collective}_node_")]
    if operator in ("stream_adamw", "checkpoint_offload"):
        known = sorted(int(n.split("_")[2]) for n in rates.names() if n.startswith("host_link_"))
        ranks = {_on_a_node(values) for values in rows}
        used = {next((k for k in known if k >= count), known[-1]) for count in ranks}
        names += [f"host_link_{count}_bytes_per_s" for count in sorted(used)]
    return names
