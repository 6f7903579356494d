"""The fold over strips, and the intervals they cover."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from operators.errors import RuleError
from operators.kernels.strip import strip_gradient_, strip_statistics
from operators.strip_fold import fold, merge, neutral
from operators.vocab_shards import VocabShards, shard_interval


@settings(deadline=None)
@given(vocab=st.integers(0, 500), ranks=st.integers(1, 64))
def test_intervals_cover_the_vocabulary_once_in_order(vocab: int, ranks: int) -> None:
    end = 0
    for rank in range(ranks):
        start, stop = shard_interval(vocab, ranks, rank)
        assert start == end
        assert 0 <= stop - start <= -(-vocab // ranks)
        end = stop
    assert end == vocab
    assert VocabShards.even(vocab, ranks).vocab == vocab


def test_shards_of_a_vocabulary_that_does_not_divide() -> None:
    assert VocabShards.even(37, 4).rows == (10, 10, 10, 7)
    assert VocabShards.even(37, 4).starts == (0, 10, 20, 30)
    assert VocabShards.even(2, 4).rows == (1, 1, 0, 0)
    with pytest.raises(RuleError, match="0 <= rank < ranks"):
        shard_interval(10, 2, 2)


def _statistics(rows: tuple[int, ...], logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    shards = VocabShards.of(rows)
    out = torch.empty(len(rows), logits.shape[0], 3, dtype=torch.float64)
    for shard, (start, count) in enumerate(zip(shards.starts, shards.rows, strict=True)):
        strip_statistics(logits[:, start : start + count].clone(), None, targets, start, out[shard])
    return out


@settings(deadline=None)
@given(
    rows=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(lambda r: sum(r) > 0),
    scale=st.sampled_from([0.1, 1.0, 300.0]),
    seed=st.integers(0, 1000),
)
def test_fold_equals_log_softmax_for_any_cut(rows: list[int], scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, sum(rows), generator=generator, dtype=torch.float64) * scale
    targets = torch.randint(0, sum(rows), (4,), generator=generator)
    log_sum_exp, target = fold(_statistics(tuple(rows), logits, targets))
    right = torch.log_softmax(logits, 1).gather(1, targets.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(target - log_sum_exp, right, rtol=1e-12, atol=1e-12)


def test_empty_strips_and_strips_of_minus_infinity_are_neutral() -> None:
    logits = torch.randn(3, 6, dtype=torch.float64)
    logits[:, 2:4] = -torch.inf
    targets = torch.tensor([0, 5, 4])
    whole, _ = fold(_statistics((6,), logits, targets))
    for rows in ((0, 2, 2, 0, 2), (2, 2, 2), (0, 6), (6, 0)):
        log_sum_exp, _ = fold(_statistics(rows, logits, targets))
        torch.testing.assert_close(log_sum_exp, whole)
    nothing = torch.empty(2, 3, 3)
    neutral(nothing[0])
    neutral(nothing[1])
    assert torch.equal(merge(nothing[0], nothing[1]), nothing[0])
    assert (fold(nothing)[0] == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradient_equals_autograd_across_blocks_of_rows(dtype: torch.dtype) -> None:
    # wide enough that the torch path needs several blocks
    torch.manual_seed(0)
    exact = torch.float64 if dtype is torch.float64 else torch.float32
    tile, bias = torch.randn(40, 20_000).to(dtype), torch.randn(20_000).to(dtype)
    targets = torch.randint(-5_000, 25_000, (40,))
    upstream = torch.rand(40, dtype=exact)
    upstream[::4] = 0
    logits = tile.to(exact) + bias.to(exact)
    log_sum_exp = torch.logsumexp(logits, 1)
    one_hot = (torch.arange(20_000) == targets.unsqueeze(1)).to(exact)
    right = (torch.softmax(logits, 1) - one_hot) * upstream.unsqueeze(1)
    tile[0] = torch.inf  # an ignored row may hold anything
    strip_gradient_(tile, bias, targets, 0, log_sum_exp_n=log_sum_exp, upstream_n=upstream)
    torch.testing.assert_close(
        tile.to(exact), right, rtol=1e-2 if dtype is torch.bfloat16 else 1e-4, atol=1e-8
    )
