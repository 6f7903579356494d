"""What a profile asks of the busiest rank, against the plan that ranks really make."""

from __future__ import annotations

from typing import Any

import pytest

from cost_model.errors import RuleError
from operators.dispatch_launch import DispatchLaunch
from operators.dispatch_plan import make_plan
from operators.ranks import Ranks
from operators.routing import profile
from tests.gang import gang
from tuner.routing.load import dispatch_load

RANKS, TOKENS, EXPERTS, TOP_K = 2, 50, 8, 3


def _received(ranks: Ranks, name: str, chunks: int, migrate: bool) -> tuple[int, int]:
    routing = profile(name, TOKENS, EXPERTS, TOP_K, ranks.rank, ranks=ranks.size)
    launch = DispatchLaunch.for_chunks(chunks, TOKENS, min_rows=4, migrate=migrate)
    plan = make_plan(routing, ranks, launch)
    return plan.received_most, plan.guests


@pytest.mark.parametrize("name", ["balanced", "skew:80/2", "random", "one_hot", "rank_dependent", "drifting"])
def test_load_covers_what_the_plan_receives(name: str) -> None:
    for chunks in (1, 2, 5):
        for migrate in (True, False):
            real = gang(RANKS).run(_received, name, chunks, migrate)
            load = dispatch_load(
                profile=name,
                tokens=TOKENS,
                experts=EXPERTS,
                top_k=TOP_K,
                ranks=RANKS,
                chunks=chunks,
                min_rows=4,
                migrate=migrate,
            )
            rows, guests = max(r for r, _ in real), max(g for _, g in real)
            assert load.migrated_experts >= guests
            if migrate and guests:
                assert rows <= load.rows_per_chunk <= RANKS * TOP_K * -(-TOKENS // chunks)
            else:
                assert (load.rows_per_chunk, load.migrated_experts) == (rows, 0)


def test_loads_that_are_alike_on_all_ranks_are_counted_once() -> None:
    known = {"tokens": 4096, "experts": 64, "top_k": 4, "chunks": 4, "min_rows": 8, "migrate": True}
    for name in ("balanced", "skew:80/4", "one_hot", "drifting"):
        few = dispatch_load(profile=name, ranks=2, **known)
        many = dispatch_load(profile=name, ranks=64, **known)
        assert many.rows_per_chunk >= few.rows_per_chunk > 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokens": 2**40}, "tokens_per_rank"),
        ({"tokens": 2**20, "profile": "random"}, "tokens_per_rank"),
        ({"chunks": 2**24}, "chunks"),
    ],
)
def test_what_cannot_be_counted_is_refused(change: dict[str, int | str], named: str) -> None:
    known: dict[str, Any] = {"profile": "balanced", "tokens": 64, "experts": 64, "top_k": 4, "ranks": 4}
    with pytest.raises(RuleError, match=named):
        dispatch_load(**{**known, "chunks": 1, "min_rows": 1, "migrate": True, **change})
