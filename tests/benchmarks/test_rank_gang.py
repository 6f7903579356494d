"""Ranks of a benchmark: they answer together, and a part that fails costs itself only."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.rank_gang import PartFailed, RankGang
from benchmarks.two_gpus_parts import timed
from operators.ranks import ProcessRanks


def total(ranks: ProcessRanks, payload: dict[str, Any]) -> int:
    number = torch.tensor([payload["start"] + ranks.rank])
    ranks.all_reduce(number)
    return int(number)


def seconds(ranks: ProcessRanks, payload: dict[str, Any]) -> float:
    return timed(ranks, torch.device("cpu"), lambda: time.sleep(payload["sleep"]))


def fail_on_one(ranks: ProcessRanks, payload: dict[str, Any]) -> None:
    if ranks.rank == payload["rank"]:
        raise ValueError("this rank has had enough")
    ranks.barrier()


def never_comes(ranks: ProcessRanks, payload: dict[str, Any]) -> None:
    if ranks.rank == payload["rank"]:
        time.sleep(60)
    ranks.barrier()


@pytest.fixture(scope="module")
def gang() -> Iterator[RankGang]:
    with RankGang(2, "cpu") as made:
        yield made


def test_answers_come_in_rank_order(gang: RankGang) -> None:
    assert gang.run(f"{__name__}:total", {"start": 10}, 60.0) == [21, 21]
    slow = gang.run(f"{__name__}:seconds", {"sleep": 0.05}, 60.0)
    assert min(slow) >= 0.05


def test_a_part_that_fails_on_one_rank_says_so_and_the_next_one_runs(gang: RankGang) -> None:
    with pytest.raises(PartFailed, match="this rank has had enough"):
        gang.run(f"{__name__}:fail_on_one", {"rank": 1}, 60.0)
    assert gang.run(f"{__name__}:total", {"start": 0}, 60.0) == [1, 1]


def test_a_part_that_hangs_is_ended(gang: RankGang) -> None:
    with pytest.raises(PartFailed, match="longer than 1 s"):
        gang.run(f"{__name__}:never_comes", {"rank": 0}, 1.0)
    assert gang.run(f"{__name__}:total", {"start": 5}, 60.0) == [11, 11]
