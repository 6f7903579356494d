"""Samples of dispatch with their router as numbers: what the cost model's formulas read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from cost_model.samples import with_ranks
from tuner.routing_numbers import profile_loads, routing_numbers

_BY_POSITION = ("balanced", "skew", "one_hot")
_DISPATCH = "pipelined_llep"


def routing_values(shape: Mapping[str, Any], ranks: int) -> dict[str, float]:
    """What the profile of a dispatch shape means on ``ranks`` ranks, as the formulas call it.

    Args:
        shape: of a sweep: ``tokens_per_rank``, ``experts``, ``top_k``, ``profile`` (balanced), ``min_rows`` (1024),
            ``loopback`` (False).

    Returns:
        ``imbalance`` after the least-loaded plan, ``migrated_experts`` of the rank with most guests, ``send_ratio``.

    Raises:
        RuleError: no such profile.
    """
    numbers = _numbers(
        profile=str(shape.get("profile", "balanced")),
        tokens=int(shape["tokens_per_rank"]),
        experts=int(shape["experts"]),
        top_k=int(shape["top_k"]),
        ranks=ranks,
        min_rows=int(shape.get("min_rows", 1024)),
        loopback=bool(shape.get("loopback", False)),
    )
    return dict(zip(("imbalance", "migrated_experts", "send_ratio"), numbers, strict=True))


@lru_cache(maxsize=1024)
def _numbers(
    *, profile: str, tokens: int, experts: int, top_k: int, ranks: int, min_rows: int, loopback: bool
) -> tuple[float, int, float]:
    if profile.partition(":")[0] in _BY_POSITION:
        loads = np.asarray(profile_loads(profile, tokens, experts, top_k))
    else:
        loads = _drawn_loads(profile, tokens, experts, top_k, ranks)
        loads = loads[0] if loopback else loads  # peers that are not there route as this rank does
    found = routing_numbers(loads, ranks, min_rows=min_rows)
    return found.balanced_imbalance, found.migrated_experts, found.send_ratio


def _drawn_loads(profile: str, tokens: int, experts: int, top_k: int, ranks: int) -> np.ndarray:
    """Rows per expert source by source, [ranks, experts], from the ids that the operator itself was given."""
    from operators.routing import profile as make_profile

    return np.stack(
        [
            make_profile(profile, tokens, experts, top_k, rank, ranks=ranks)
            .ids_NK.flatten()
            .bincount(minlength=experts)
            .numpy()
            for rank in range(ranks)
        ]
    )


def with_routing(samples: pd.DataFrame) -> pd.DataFrame:
    """Dispatch rows with :func:`routing_values` and ``ranks`` in their ``shape_json``; other rows as they are.

    A shape that has an ``imbalance`` already keeps its numbers. Ranks are those of
    :func:`cost_model.samples.with_ranks`.
    """
    mine = samples["operator"] == _DISPATCH
    if not mine.any():
        return samples
    rows = with_ranks(samples[mine])
    texts, ranks = [str(text) for text in rows["shape_json"]], [int(one) for one in rows["ranks"]]
    known = {pair: _told(*pair) for pair in set(zip(texts, ranks, strict=True))}
    out = samples.copy()
    out.loc[mine, "shape_json"] = [known[pair] for pair in zip(texts, ranks, strict=True)]
    return out


def _told(text: str, ranks: int) -> str:
    shape = json.loads(text)
    shape.setdefault("ranks", int(ranks))
    if "imbalance" not in shape:
        shape |= routing_values(shape, shape["ranks"])
    return json.dumps(shape, sort_keys=True)
