"""The group an operator talks through: what it promises, over gloo and in loopback."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from operators.errors import RuleError
from operators.ranks import LoopbackRanks, ProcessRanks, Ranks
from tests.gang import Gang, RankFailed, gang


def _exchange(ranks: Ranks) -> list[float]:
    # rank r sends r+1 rows valued 10*r+to to every rank
    n = ranks.rank + 1
    source = torch.cat(
        [torch.full((n, 3), 10.0 * ranks.rank + to, dtype=torch.bfloat16) for to in range(ranks.size)]
    )
    out_splits = [r + 1 for r in range(ranks.size)]
    output = torch.empty(sum(out_splits), 3, dtype=torch.bfloat16)
    ranks.all_to_all(output, source, out_splits, [n] * ranks.size).wait()
    return [float(v) for v in output[:, 0]]


def test_all_to_all_moves_rows_of_any_dtype_to_their_rank() -> None:
    for rank, values in enumerate(gang(4).run(_exchange)):
        assert values == [10.0 * r + rank for r in range(4) for _ in range(r + 1)]


def _empty_exchange(ranks: Ranks) -> int:
    # only rank 0 has rows, all for the last rank
    rows = 5 if ranks.rank == 0 else 0
    to = [rows if r == ranks.size - 1 else 0 for r in range(ranks.size)]
    got = [5 if r == 0 and ranks.rank == ranks.size - 1 else 0 for r in range(ranks.size)]
    output = torch.zeros(sum(got), 2)
    ranks.all_to_all(output, torch.ones(rows, 2), got, to).wait()
    return int(output.sum())


def test_ranks_without_rows_take_part() -> None:
    assert gang(4).run(_empty_exchange) == [0, 0, 0, 10]


def _hop(ranks: Ranks) -> tuple[int, int]:
    # shards of uneven, also empty, size travel one place
    mine = torch.full((ranks.rank,), ranks.rank)
    source = (ranks.rank - 1) % ranks.size
    receive = torch.empty(source, dtype=mine.dtype)
    ranks.shift(mine, receive).wait()
    return receive.numel(), int(receive.sum())


def test_ring_hop_carries_uneven_and_empty_shards() -> None:
    assert gang(4).run(_hop) == [(3, 9), (0, 0), (1, 1), (2, 4)]


def _gather(ranks: Ranks) -> list[list[int]]:
    total = torch.tensor([1])
    ranks.all_reduce(total)
    return [ranks.all_gather(torch.tensor([ranks.rank, 7])).flatten().tolist(), total.tolist()]


def test_gather_and_reduce() -> None:
    assert gang(2).run(_gather) == [[[0, 7, 1, 7], [2]]] * 2


def _orders(ranks: Ranks) -> list[list[str]]:
    orders: list[list[str]] = []
    post = dist.batch_isend_irecv

    def posted(ops: list[dist.P2POp]) -> list[dist.Work]:
        orders.append([op.op.__name__ for op in ops])
        return post(ops)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", posted)
        rows = torch.ones(6, 2)
        ranks.all_to_all(torch.empty_like(rows), rows, [2] * 3, [2] * 3).wait()
        ranks.all_gather(rows)
        ranks.shift(rows, torch.empty_like(rows)).wait()
    return orders


def test_over_gloo_every_receive_stands_before_the_first_send() -> None:
    """What a send finds unready waits behind it: a slow link would carry one direction after the other."""
    whole = ["irecv"] * 2 + ["isend"] * 2
    assert gang(3).run(_orders) == [[whole, whole, ["irecv", "isend"]]] * 3


def _drops(ranks: Ranks, kind: str) -> list[float]:
    """Rank 1 drops an exchange before its wait, as whoever raises does; then all go on."""
    mine = torch.full((6, 2), float(ranks.rank))
    out = torch.empty_like(mine)
    pending = ranks.shift(mine, out) if kind == "shift" else ranks.all_to_all(out, mine, [2] * 3, [2] * 3)
    if ranks.rank != 1:
        pending.wait()
        pending.wait()  # which is nothing by then
    del pending, mine, out
    gathered = ranks.all_gather(torch.tensor([float(ranks.rank)]))
    again = torch.empty(3)
    ranks.all_to_all(again, gathered.flatten(), [1] * 3, [1] * 3).wait()
    ranks.barrier()
    return [*gathered.flatten().tolist(), *again.tolist()]


@pytest.mark.parametrize("kind", ["shift", "all_to_all"])
def test_an_exchange_that_one_rank_drops_leaves_the_group_whole(kind: str) -> None:
    assert gang(3).run(_drops, kind) == [[0.0, 1.0, 2.0, *[float(rank)] * 3] for rank in range(3)]


def _beside_own_sends(ranks: Ranks) -> list[float]:
    """A caller's own message on the same group, posted before and sent after ours, on a group's first exchange."""
    group = dist.new_group(backend="gloo")
    ranks = ProcessRanks(group)
    mine = torch.full((1,), float(ranks.rank))
    theirs = torch.zeros(1)
    work = dist.irecv(theirs, 1, group=group) if ranks.rank == 0 else None
    gathered = ranks.all_gather(mine)
    if ranks.rank == 1:
        dist.send(torch.full((1,), 99.0), 0, group=group)
    if work is not None:
        work.wait()
    return [*gathered.flatten().tolist(), float(theirs)]


def test_a_callers_own_messages_are_not_taken_for_rows() -> None:
    first, second = gang(2).run(_beside_own_sends)
    assert (first, second) == ([0.0, 1.0, 99.0], [0.0, 1.0, 0.0])


def _keeps_another_size(ranks: Ranks) -> str:
    rows = torch.ones(2, 1, dtype=torch.uint8)
    splits = [1, 1]
    splits[ranks.rank] = 3
    try:
        ranks.all_to_all(torch.empty(4, 1, dtype=torch.uint8), rows, splits, [1, 1])
    except RuleError as error:
        return error.rule
    return "taken"


def test_what_a_rank_keeps_has_one_size() -> None:
    assert gang(2).run(_keeps_another_size) == ["a rank receives from itself what it sends to itself"] * 2


def _fail_on_one(ranks: Ranks) -> None:
    if ranks.rank == 1:
        raise ValueError("rank 1 is ill")


def test_a_failing_rank_fails_the_test_with_its_traceback() -> None:
    own = Gang(2)
    with pytest.raises(RankFailed, match="rank 1 is ill"):
        own.run(_fail_on_one)


def test_loopback_gives_rows_of_the_right_size_without_temporaries() -> None:
    ranks = LoopbackRanks(4, 2)
    source = torch.arange(6.0).reshape(3, 2)
    output = torch.full((7, 2), torch.nan)
    ranks.all_to_all(output, source, [2, 2, 2, 1], [1, 1, 1, 0]).wait()
    assert output[:, 0].tolist() == [0, 2, 4, 0, 2, 4, 0]
    assert ranks.all_gather(torch.tensor([3])).tolist() == [[3]] * 4
    empty = torch.full((2, 2), torch.nan)
    ranks.all_to_all(empty, source[:0], [2, 0, 0, 0], [0] * 4).wait()
    assert empty.tolist() == [[0, 0], [0, 0]]


def test_errors_name_rule_value_and_remedy() -> None:
    with pytest.raises(RuleError) as bad:
        LoopbackRanks(2, 2)
    assert bad.value.value == (2, 2)
    assert bad.value.remedy
    with pytest.raises(RuleError, match="initialised process group"):
        ProcessRanks()
