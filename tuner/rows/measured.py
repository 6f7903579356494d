"""Measured points of fronts: what a sweep has shown for exactly this shape on exactly this hardware."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from cost_model.latency import GroupLinks
from cost_model.sample_rules import broken_rule
from cost_model.samples import slowest, split_modes, with_ranks
from cost_model.step_shape import StepShape
from tuner.routing.rows import routing_values
from tuner.rows.current_rows import current_rows

_SCALAR_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
Points = dict[Any, Any]


@dataclass(frozen=True)
class MeasuredFronts:
    """Seconds by (operator, shape key) and configuration, for the passes that were timed.

    Attributes:
        flagged: trials that were left out because others used the machine as they ran.
    """

    points: Mapping[tuple[Any, ...], Points]
    flagged: int = 0

    @staticmethod
    def of(samples: pd.DataFrame, hardware_id: str) -> MeasuredFronts:
        """Reads sweep rows of our own operators taken on ``hardware_id``; rows of other hardware are left out, and
        so are those of older versions of an operator.

        A configuration's latency is the slowest rank's per repeat, then the median of the fast mode. Groups of
        different sizes are kept apart (:func:`cost_model.samples.with_ranks`).
        """
        if samples.empty:
            return MeasuredFronts({})
        ours = samples[(samples["hardware_id"] == hardware_id) & (samples["provider"] == "flatpeak")]
        ours = current_rows(ours[np.isfinite(ours["seconds"].astype(float))])
        # a rank in loopback had no peers: its time lacks the links
        alone = [bool(json.loads(shape).get("loopback", False)) for shape in ours["shape_json"]]
        ours = ours[~np.array(alone, dtype=bool)]
        passes: dict[tuple[str, str, str, int], dict[str, float]] = defaultdict(dict)
        keys = ["operator", "shape_json", "config_json", "ranks", "pass"]
        for group, rows in with_ranks(ours).groupby(keys, sort=True):
            operator, shape, config, ranks, name = (str(part) for part in group)
            fast, _ = split_modes(slowest(rows))
            passes[operator, shape, config, int(ranks)][name] = median(fast)
        points: dict[tuple[Any, ...], Points] = defaultdict(dict)
        for (operator, shape_text, config_text, size), seconds in passes.items():
            shape_of, config_of = json.loads(shape_text), json.loads(config_text)
            if broken_rule(operator, {**shape_of, **config_of, "ranks": size}) is not None:
                continue
            _place(points, operator, shape_of, config_of, ranks=size, seconds=seconds)
        return MeasuredFronts(dict(points))

    def dispatch(self, shape: StepShape) -> Points:
        """(K, schedule) to (forward, backward) seconds of one MoE layer of this shape."""
        m = shape.model
        key = (
            "pipelined_llep",
            shape.tokens,
            m.hidden,
            m.expert_intermediate,
            m.experts,
            m.top_k,
            shape.expert_degree,
            GroupLinks.of(shape.cluster, shape.expert_degree).nodes,
            shape.workload.activation_bytes,
            shape.workload.migrated_experts > 0,
        )
        return self.points.get(key, {})

    def head(self, shape: StepShape) -> Points:
        """(ring mode, strip rows) to seconds of the head, both passes."""
        m = shape.model
        key = (
            "ring_dtp",
            shape.tokens,
            m.hidden,
            m.vocab,
            shape.vocab_degree,
            GroupLinks.of(shape.cluster, shape.vocab_degree).nodes,
            shape.workload.activation_bytes,
        )
        return self.points.get(key, {})

    def optimizer(self, shape: StepShape) -> Points:
        """(engine, bucket, slots, host share) to seconds of one update of this many parameters a rank."""
        key = (
            "stream_adamw",
            int(shape.params_per_rank),
            shape.cluster.gpus_per_node,
            shape.workload.activation_bytes,
        )
        return self.points.get(key, {})

    def __bool__(self) -> bool:
        return bool(self.points)


def _place(
    points: dict[tuple[Any, ...], Points],
    operator: str,
    shape: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    ranks: int,
    seconds: Mapping[str, float],
) -> None:
    scalar = _SCALAR_BYTES.get(str(shape.get("dtype", "float32")), 4)
    nodes = int(shape.get("nodes", 1))
    if operator == "pipelined_llep":
        if "forward" not in seconds or "backward" not in seconds:
            return
        try:
            migrates = routing_values(shape, ranks)["migrated_experts"] > 0
        except ValueError:  # which of the two kinds its router is cannot be told
            return
        key: tuple[Any, ...] = (
            operator,
            shape["tokens_per_rank"],
            shape["hidden"],
            shape["intermediate"],
            shape["experts"],
            shape["top_k"],
            ranks,
            nodes,
            scalar,
            # a router whose experts migrate says nothing of one whose experts stay, nor the other way round
            migrates,
        )
        chunks = int(config["chunks"])
        chunk = -(-int(shape["tokens_per_rank"]) // chunks)
        count = -(-int(shape["tokens_per_rank"]) // chunk)
        schedule = str(config.get("dispatch_schedule", "serial"))
        took = (seconds["forward"], seconds["backward"])
        for name in {schedule, "serial"} if count == 1 else {schedule}:
            # of several routers the slower one: which of them the run will have is not known
            points[key][count, name] = max(took, points[key].get((count, name), took), key=sum)
    elif operator == "ring_dtp":
        key = (operator, shape["tokens_per_rank"], shape["hidden"], shape["vocab"], ranks, nodes, scalar)
        mode, tokens = str(config.get("ring_mode", "auto")), int(shape["tokens_per_rank"])
        if mode == "auto":
            mode = "weights" if tokens > int(shape["vocab"]) / ranks else "activations"
        rows = min(int(config.get("strip_rows") or tokens), tokens)
        points[key][mode, rows] = sum(seconds.values())
    elif operator == "stream_adamw":
        engine = str(config.get("engine", "stream"))
        share = float(config.get("host_share", 0.0))
        knobs = (engine, int(config["bucket_params"]), int(config["staging_slots"]), share)
        key = (operator, int(shape["params"]), ranks // nodes, scalar)
        # the same parameters in fewer or in more tensors: how a run has them is not known
        points[key][knobs] = max(sum(seconds.values()), points[key].get(knobs, 0.0))
