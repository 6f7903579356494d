"""Samples of dispatch with their router as numbers: what the cost model's formulas read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from cost_model.errors import RuleError
from cost_model.samples import with_ranks
from tuner.routing.numbers import profile_loads, routing_numbers

_BY_POSITION = ("balanced", "skew", "one_hot")
_BY_RANK = ("random", "rank_dependent", "ties")
_SCORED = ("random", "rank_dependent")
_MOST_COUNTED = 2**25
"""Entries of one rank's scores, and of all ranks' ids: what a sweep may ask too (``tuner.routing.load``)."""
_MOST_DRAWN = 2**28
"""Scores of all ranks: ten seconds' work, or so."""
_MOST_PLANNED = 2**21
"""Loads of the least-loaded plan: some seconds' work."""
_DISPATCH = "pipelined_llep"


def routing_values(shape: Mapping[str, Any], ranks: int) -> dict[str, float]:
    """What the profile of a dispatch shape means on ``ranks`` ranks, as the formulas call it.

    Args:
        shape: of a sweep: ``tokens_per_rank``, ``experts``, ``top_k``, ``profile`` (balanced), ``min_rows`` (1024),
            ``loopback`` (False).

    Returns:
        ``imbalance`` after the least-loaded plan, ``migrated_experts`` of the rank with most guests, ``send_ratio``.

    Raises:
        RuleError: no such profile, or one that takes too long to count.
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
    if min(tokens, experts, top_k, ranks) < 1 or experts % ranks:
        raise RuleError(
            rule="sizes are at least 1, and experts a multiple of the ranks that share them",
            value=(tokens, experts, top_k, ranks),
            remedy="Correct the shape.",
        )
    # peers that are not there route as this rank does
    drawn = ranks if profile in _BY_RANK and not loopback else 1
    _check_work(tokens * (experts if profile in _SCORED else top_k), tokens, _MOST_COUNTED)
    _check_work(tokens * top_k * drawn, tokens, _MOST_COUNTED)
    _check_work(tokens * experts * drawn if profile in _SCORED else 0, tokens, _MOST_DRAWN)
    _check_work(ranks * experts, tokens, _MOST_PLANNED)
    if profile.partition(":")[0] in _BY_POSITION:
        loads = np.asarray(profile_loads(profile, tokens, experts, top_k))
    else:
        loads = _drawn_loads(profile, (tokens, experts, top_k), ranks, drawn)
        loads = loads if drawn > 1 else loads[0]
    found = routing_numbers(loads, ranks, min_rows=min_rows)
    return found.balanced_imbalance, found.migrated_experts, found.send_ratio


def _check_work(entries: int, tokens: int, most: int) -> None:
    if entries > most:
        raise RuleError(
            rule=f"a router is counted for at most {most} entries: its ranks, tokens and experts make {entries}",
            value=tokens,
            remedy="Choose fewer tokens, experts or ranks.",
        )


def _drawn_loads(profile: str, sizes: tuple[int, int, int], ranks: int, drawn: int) -> np.ndarray:
    """Rows per expert of the first sources, [drawn, experts], from the ids that the operator itself was given."""
    from operators.routing import profile as make_profile

    tokens, experts, top_k = sizes
    return np.stack(
        [
            make_profile(profile, tokens, experts, top_k, rank, ranks=ranks)
            .ids_NK.flatten()
            .bincount(minlength=experts)
            .numpy()
            for rank in range(drawn)
        ]
    )


def with_routing(samples: pd.DataFrame) -> pd.DataFrame:
    """Dispatch rows with :func:`routing_values` and ``ranks`` in their ``shape_json``; other rows as they are.

    A shape that has an ``imbalance`` already keeps its numbers; where they cannot be had (no such profile, too large a
    group, a size that is none), it is null, and a fit leaves the row out. Ranks are those of
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
    if not isinstance(shape, dict) or "imbalance" in shape:
        return json.dumps(shape | {"ranks": ranks} if isinstance(shape, dict) else shape, sort_keys=True)
    try:
        numbers: dict[str, Any] = dict(routing_values(shape, ranks))
    except (RuleError, KeyError, TypeError, ValueError, ArithmeticError):
        numbers = {"imbalance": None}
    return json.dumps(shape | {"ranks": ranks} | numbers, sort_keys=True)
