"""What a routing profile asks of the busiest rank: rows of its largest chunk, and experts it takes in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from cost_model.errors import RuleError

if TYPE_CHECKING:
    from torch import Tensor

_DRAWN = ("random", "rank_dependent", "ties")
_MOST_COUNTED = 2**25


@dataclass(frozen=True, slots=True)
class DispatchLoad:
    """For the rank that it is worst for."""

    rows_per_chunk: int
    """Most rows received in one chunk; at least what happens, exact where no expert is split."""
    migrated_experts: int
    """Most guests computed for others, or copies of own experts sent out, whichever is more."""


@lru_cache(maxsize=2)
def _ids(profile: str, tokens: int, experts: int, top_k: int, ranks: int) -> tuple[Tensor, ...]:
    """Every rank's ids: drawing them costs seconds at full size, and all values of K ask for the same.

    One tensor where all ranks have the same.
    """
    from operators.routing import profile as make_profile

    drawn = profile in _DRAWN
    each = experts if drawn else top_k
    _check_counted("tokens_per_rank", tokens * each, tokens)
    _check_counted("tokens_per_rank", tokens * top_k * (ranks if drawn else 1), tokens)
    return tuple(
        make_profile(profile, tokens, experts, top_k, rank, ranks=ranks).ids_NK
        for rank in range(ranks if drawn else 1)
    )


def _check_counted(name: str, entries: int, value: int) -> None:
    if entries > _MOST_COUNTED:
        raise RuleError(
            rule=f"a routing profile is counted for at most {_MOST_COUNTED} entries: {name} makes it {entries}",
            value=value,
            remedy="Choose fewer tokens, chunks, experts or ranks.",
        )


@lru_cache(maxsize=4096)
def dispatch_load(
    *,
    profile: str,
    tokens: int,
    experts: int,
    top_k: int,
    ranks: int,
    chunks: int,
    min_rows: int,
    migrate: bool,
) -> DispatchLoad:
    """Follow the profile's ids through the strided chunks and the least-loaded plan.

    A sweep knows its routing, so Eq. 6 need not guard against every router: a configuration is refused for
    what its own rows need. Eq. 1's guarantee would refuse E_p times less than that.

    Args:
        tokens: N on every rank.
        chunks: K; chunk i holds the tokens i, i+K, …
        min_rows: m of the plan.
        migrate: False for standard expert parallelism.
    """
    import torch

    from operators.least_loaded import plan_least_loaded

    _check_counted("chunks", ranks * chunks * experts, chunks)
    ids = _ids(profile, tokens, experts, top_k, ranks)
    counts_PCE = torch.zeros(ranks, chunks, experts, dtype=torch.int64)
    chunk_N1 = torch.arange(tokens).remainder(chunks).unsqueeze(1)
    for rank, ids_NK in enumerate(ids):
        keys = (chunk_N1 * experts + ids_NK).flatten()
        counts_PCE[rank] = torch.bincount(keys, minlength=chunks * experts).view(chunks, experts)
    if len(ids) == 1:
        counts_PCE[1:] = counts_PCE[0]
    loads = counts_PCE.sum((0, 1)).tolist()
    plan = plan_least_loaded(loads, ranks, min_rows=min_rows, switch=1.3 if migrate else float("inf"))
    by_source_PE = counts_PCE.sum(1)
    rows_CR = torch.zeros(chunks, ranks, dtype=torch.int64)
    copies = [0] * ranks
    for expert, pieces in enumerate(plan.intervals):
        ends_P = by_source_PE[:, expert].cumsum(0)
        for rank, start, end in pieces:
            share_P = (ends_P.clamp(max=end) - (ends_P - by_source_PE[:, expert]).clamp(min=start)).clamp(
                min=0
            )
            # a split expert's piece may hold any of a source's rows, but not more of a chunk than there are
            rows_CR[:, rank] += torch.minimum(counts_PCE[:, :, expert], share_P.unsqueeze(1)).sum(0)
            if rank != plan.native(expert):
                copies[plan.native(expert)] += 1
    guests = max((len(plan.guests(rank)) for rank in range(ranks)), default=0)
    return DispatchLoad(int(rows_CR.max()), max(guests, *copies))
