"""Decisions of all ranks: the least of all, and everybody fails or nobody does."""

from __future__ import annotations

import pytest
import torch

from operators.agreement import agree_max, agree_min, all_or_none, wanted_on_this_host
from operators.checkpoint_offload import OffloadSession
from operators.checkpoint_offload_slots import BoundarySlab
from operators.errors import RuleError
from operators.pinned_slab import PAGE_BYTES
from operators.ranks import LoopbackRanks, Ranks
from tests.gang import gang

_SIZES = pytest.mark.parametrize("size", [2, 4])


def _extremes(ranks: Ranks) -> tuple[int, int]:
    return agree_min(ranks, 10 + ranks.rank), agree_max(ranks, 10 + ranks.rank)


@_SIZES
def test_least_and_largest(size: int) -> None:
    assert gang(size).run(_extremes) == [(10, 9 + size)] * size


def _together(ranks: Ranks) -> int:
    return wanted_on_this_host(ranks, 100 + ranks.rank)


@_SIZES
def test_what_the_ranks_of_a_host_want_adds_up(size: int) -> None:
    assert gang(size).run(_together) == [sum(100 + r for r in range(size))] * size


def _try(ranks: Ranks, ill: list[int]) -> tuple[str, list[str]]:
    undone: list[str] = []

    def attempt() -> str:
        if ranks.rank in ill:
            raise MemoryError(f"no room on rank {ranks.rank}: " + "é" * 600)
        return f"kept by {ranks.rank}"

    try:
        return all_or_none(ranks, attempt, undo=undone.append, what="reserving"), undone
    except RuleError as error:
        return str(error), undone


@_SIZES
def test_one_failing_rank_makes_all_raise_the_same(size: int) -> None:
    answers = gang(size).run(_try, [1])
    texts = {text for text, _ in answers}
    assert len(texts) == 1
    assert "failed on [1]: rank 1 said: no room on rank 1" in texts.pop()
    assert [undone for _, undone in answers] == [[] if r == 1 else [f"kept by {r}"] for r in range(size)]


@_SIZES
def test_all_ranks_failing_and_none(size: int) -> None:
    everyone = list(range(size))
    assert all(f"failed on {everyone}" in text for text, _ in gang(size).run(_try, everyone))
    assert gang(size).run(_try, []) == [(f"kept by {r}", []) for r in everyone]


def test_alone_and_in_loopback() -> None:
    assert agree_min(None, 5) == agree_min(LoopbackRanks(4, 1), 5) == 5
    assert wanted_on_this_host(None, 5) == wanted_on_this_host(LoopbackRanks(4, 1), 5) == 5
    with pytest.raises(MemoryError):
        all_or_none(None, _raise, undo=_never, what="reserving")
    with pytest.raises(RuleError, match=r"failed on \[1\]"):
        all_or_none(LoopbackRanks(4, 1), _raise, undo=_never, what="reserving")


def _raise() -> None:
    raise MemoryError("none")


def _never(_: object) -> None:
    pytest.fail("nothing was kept")


def _budget(ranks: Ranks, pages: list[int]) -> int | str:
    try:
        with BoundarySlab(pages[ranks.rank] * PAGE_BYTES + 17, ranks=ranks) as slab:
            return slab.locked_bytes // PAGE_BYTES
    except RuleError as error:
        return str(error)


@_SIZES
def test_the_smallest_budget_is_everybodys(size: int) -> None:
    assert gang(size).run(_budget, [3, 2, 5, 4]) == [2] * size


@_SIZES
def test_a_negative_budget_of_one_rank_is_refused_by_all(size: int) -> None:
    answers = gang(size).run(_budget, [3, -2, 5, 4])
    assert len(set(answers)) == 1
    assert "at least 0 bytes on every rank" in answers[0]


def _known(ranks: Ranks, tokens: list[int], budget: int) -> int:
    session = OffloadSession(
        budget,
        ranks=ranks,
        boundary_bytes=tokens[ranks.rank] * PAGE_BYTES,
        boundaries=9,
        device="cpu",
    )
    locked = session.report().locked_bytes
    session.close()
    return locked // PAGE_BYTES


@_SIZES
def test_ranks_agree_on_the_number_where_boundaries_differ(size: int) -> None:
    tokens = [2, 3, 0, 1]
    # 10 pages hold 5 boundaries of 2 pages and 3 of 3: three each, in the boundaries' own size; one has none
    assert gang(size).run(_known, tokens, 10 * PAGE_BYTES) == [6, 9, 0, 3][:size]


def _one_host_is_too_small(ranks: Ranks) -> str:
    # one rank's reservation fails where the others' would not
    wanted = 2**50 if ranks.rank == 1 else PAGE_BYTES
    try:
        BoundarySlab(wanted, ranks=ranks, same_on_all=False)
    except RuleError as error:
        return str(error)
    return "reserved"


@_SIZES
def test_a_rank_that_cannot_reserve_fails_all_before_the_step(size: int) -> None:
    answers = gang(size).run(_one_host_is_too_small)
    assert "reserved" not in answers
    assert all("host memory" in text for text in answers)


def _steps_after_failure(ranks: Ranks) -> float:
    _one_host_is_too_small(ranks)
    total = torch.ones(1)
    ranks.all_reduce(total)  # nobody is left behind in another collective
    return float(total)


def test_the_group_is_usable_after_a_refusal() -> None:
    assert gang(4).run(_steps_after_failure) == [4.0] * 4
