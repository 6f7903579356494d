"""The slab's free pieces and shares: whatever is taken and given back, nothing overlaps and nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.checkpoint_offload_slots import BoundarySlab, FreeList
from operators.errors import RuleError
from operators.pinned_slab import PAGE_BYTES, page_rounded
from operators.ranks import Ranks
from tests.gang import gang

_PAGES = 16


@given(st.lists(st.one_of(st.integers(1, 6 * PAGE_BYTES), st.integers(-_PAGES, -1)), max_size=40))
def test_pieces_never_overlap_and_all_come_back(moves: list[int]) -> None:
    free = FreeList(_PAGES * PAGE_BYTES)
    taken: list[tuple[int, int]] = []
    for move in moves:
        if move < 0:
            if taken:
                free.give(*taken.pop(move % len(taken)))
            continue
        start = free.take(move)
        if start is None:
            continue
        end = start + page_rounded(move)
        assert start % PAGE_BYTES == 0
        assert end <= _PAGES * PAGE_BYTES
        assert all(end <= s or s + page_rounded(n) <= start for s, n in taken)
        taken.append((start, move))
        assert free.free_bytes == _PAGES * PAGE_BYTES - sum(page_rounded(n) for _, n in taken)
    for piece in taken:
        free.give(*piece)
    assert free.take(_PAGES * PAGE_BYTES) == 0  # one piece again


class _Owner:
    pass


def test_a_share_is_a_limit_and_returns_when_its_owner_ends() -> None:
    with BoundarySlab(4 * PAGE_BYTES) as slab:
        one, two = _Owner(), _Owner()
        slab.claim(one, 3 * PAGE_BYTES)
        slab.claim(two, PAGE_BYTES)
        start = slab.take(one, 2 * PAGE_BYTES + 1)
        assert start == 0
        assert slab.take(one, 1) is None
        assert slab.view(start, 5).numel() == 5
        assert (slab.used(one), slab.quota(two), slab.free_bytes) == (3 * PAGE_BYTES, PAGE_BYTES, PAGE_BYTES)
        slab.give(one, start, 2 * PAGE_BYTES + 1)
        assert slab.used(one) == 0
        del one
        assert slab.unassigned_bytes == 3 * PAGE_BYTES
        with pytest.raises(RuleError, match="unclaimed"):
            slab.claim(_Owner(), 3 * PAGE_BYTES + 1)


def test_a_closed_slab_gives_nothing() -> None:
    slab = BoundarySlab(PAGE_BYTES)
    owner = _Owner()
    slab.claim(owner, PAGE_BYTES)
    slab.close()
    assert slab.take(owner, 1) is None
    assert slab.locked_bytes == 0


def _rebalanced(ranks: Ranks) -> list[int | str]:
    with BoundarySlab(6 * PAGE_BYTES, ranks=ranks) as slab:
        owners = [_Owner(), _Owner()]
        for owner, pages in zip(owners, (2 + ranks.rank, 1), strict=True):
            slab.claim(owner, PAGE_BYTES)
            slab.wish(owner, pages * PAGE_BYTES)
        shares = slab.rebalance()
        found: list[int | str] = [shares[owner] // PAGE_BYTES for owner in owners]
        if ranks.rank == 0:
            slab.take(owners[0], 1)
        try:
            slab.rebalance()
        except RuleError as error:  # one rank still holds a boundary: refused on all
            found.append(error.rule)
        return found


def test_ranks_rebalance_to_the_same_shares_or_not_at_all() -> None:
    rule = "a slab is rebalanced between steps, when no boundary is on the host"
    assert gang(2).run(_rebalanced) == [[3, 1, rule]] * 2
