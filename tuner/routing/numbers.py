"""Routing as numbers: what a router's loads mean for a launch, by the planner that the operator itself runs.

Shape suffixes: P sources (the expert ranks), E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cost_model.errors import RuleError
from cost_model.workload import Workload
from operators.least_loaded import LeastLoadedPlan, imbalance, plan_least_loaded


@dataclass(frozen=True, slots=True)
class RoutingNumbers:
    """One layer's routing on E_p ranks."""

    imbalance: float
    """Largest over mean native rank load: what the router itself shows."""
    balanced_imbalance: float
    """The same after the least-loaded plan."""
    migrated_experts: int
    """Most experts any rank holds as guests."""
    send_ratio: float
    """Largest send of a (source, destination) pair over the mean one (rho)."""

    def applied_to(self, workload: Workload) -> Workload:
        """The workload with this router's numbers."""
        return replace(workload, imbalance=self.imbalance, migrated_experts=self.migrated_experts)


def profile_loads(name: str, tokens: int, experts: int, top_k: int) -> list[int]:
    """Rows of every expert from one rank, for the profiles that positions alone define.

    ``balanced``: token i takes (i+j) mod E. ``skew:R/h``: the first R percent take j mod h, token i of the rest
    takes h + ((i+j) mod (E-h)). ``one_hot``: every token takes experts 0..k-1.

    Raises:
        RuleError: another name, or a malformed one.
    """
    i = np.arange(tokens)[:, None]
    j = np.arange(top_k)[None, :]
    kind, _, detail = name.partition(":")
    if kind == "balanced":
        ids = (i + j) % experts
    elif kind == "one_hot":
        ids = np.broadcast_to(j, (tokens, top_k))
    elif kind == "skew":
        share, hot = _skew(name, detail, experts)
        first = int(share * tokens / 100)
        ids = np.where(i < first, j % hot, hot + (i + j) % (experts - hot))
    else:
        raise RuleError(
            rule="a routing profile with loads by position is balanced, skew:R/h or one_hot",
            value=name,
            remedy="For another router give its measured loads to routing_numbers.",
        )
    return [int(count) for count in np.bincount(ids.ravel(), minlength=experts)]


def _skew(name: str, detail: str, experts: int) -> tuple[float, int]:
    try:
        share, hot = (float(part) for part in detail.split("/"))
    except ValueError:
        share, hot = -1.0, 0.0
    if not 0 <= share <= 100 or not 1 <= hot < experts or hot != int(hot):
        raise RuleError(
            rule=f"a skew profile is skew:R/h with R from 0 to 100 and h from 1 to {experts - 1}",
            value=name,
            remedy="For example skew:80/16.",
        )
    return share, int(hot)


def routing_numbers(
    loads: Sequence[int] | Sequence[Sequence[int]] | np.ndarray,
    ranks: int,
    *,
    alpha: float = 1.0,
    min_rows: int = 1024,
    switch: float = 1.3,
) -> RoutingNumbers:
    """Plans one layer for ``loads`` and says what comes of it.

    Args:
        loads: rows per expert ``[E]`` from EACH of ``ranks`` sources, or source by source ``[E_p, E]``.
    """
    sent_PE = np.asarray(loads, dtype=np.int64)
    if sent_PE.ndim == 1:
        sent_PE = np.tile(sent_PE, (ranks, 1))
    whole = [int(count) for count in sent_PE.sum(axis=0)]
    plan = plan_least_loaded(whole, ranks, alpha=alpha, min_rows=min_rows, switch=switch)
    rows = plan.rank_rows()
    total = sum(rows)
    return RoutingNumbers(
        imbalance=max(1.0, imbalance(whole, ranks)),
        balanced_imbalance=max(rows) * ranks / total if total else 1.0,
        migrated_experts=max(len(plan.guests(rank)) for rank in range(ranks)),
        send_ratio=_send_ratio(plan, sent_PE),
    )


def _send_ratio(plan: LeastLoadedPlan, sent_PE: np.ndarray) -> float:
    """Sources hold consecutive parts of an expert's global list, so a piece takes its rows from a few of them."""
    ranks = len(sent_PE)
    sends = np.zeros((ranks, ranks))
    ends_PE = sent_PE.cumsum(axis=0)
    for expert, pieces in enumerate(plan.intervals):
        last = ends_PE[:, expert]
        first = last - sent_PE[:, expert]
        for rank, start, end in pieces:
            sends[:, rank] += np.clip(np.minimum(last, end) - np.maximum(first, start), 0, None)
    return float(sends.max() / sends.mean()) if sends.any() else 1.0
