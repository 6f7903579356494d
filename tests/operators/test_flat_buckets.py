"""The flat line and its cuts: a partition, aligned, never above the bucket."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.errors import RuleError
from operators.flat_buckets import (
    ALIGN,
    aligned,
    bucket_capacity,
    cut_buckets,
    flat_params,
    host_boundary,
)

SIZES = st.lists(st.integers(0, 1500), min_size=1, max_size=12)


@given(sizes=SIZES, bucket_params=st.integers(ALIGN, 2000), share=st.floats(0, 1))
def test_every_element_lies_in_exactly_one_bucket(sizes: list[int], bucket_params: int, share: float) -> None:
    length = flat_params(sizes)
    capacity = bucket_capacity(bucket_params, length)
    boundary = host_boundary(length, share)
    buckets = cut_buckets(sizes, 0, boundary, capacity) + cut_buckets(sizes, boundary, length, capacity)

    assert sum(b.size for b in buckets) == length
    assert [b.offset for b in buckets] == [sum(b.size for b in buckets[:i]) for i in range(len(buckets))]
    owned: list[list[int]] = [[] for _ in sizes]
    for bucket in buckets:
        assert 0 < bucket.size <= capacity <= bucket_params
        end = 0
        for segment in bucket.segments:
            assert end <= segment.offset
            end = segment.offset + segment.size
            assert end <= bucket.size
            owned[segment.param].extend(range(segment.start, segment.stop))
    assert owned == [list(range(n)) for n in sizes]


@given(sizes=SIZES, bucket_params=st.integers(ALIGN, 2000))
def test_cuts_lie_on_vector_boundaries_of_their_parameter(sizes: list[int], bucket_params: int) -> None:
    length = flat_params(sizes)
    for bucket in cut_buckets(sizes, 0, length, bucket_capacity(bucket_params, length)):
        for segment in bucket.segments:
            assert segment.offset % ALIGN == 0
            assert segment.start % ALIGN == 0
            assert segment.stop % ALIGN == 0 or segment.stop == sizes[segment.param]


def test_a_thousand_and_three_cut_at_five_hundred() -> None:
    buckets = cut_buckets([1003], 0, flat_params([1003]), bucket_capacity(500, 1024))
    assert [(s.start, s.stop) for b in buckets for s in b.segments] == [(0, 448), (448, 896), (896, 1003)]


def test_a_bucket_is_at_most_the_line() -> None:
    assert bucket_capacity(10_000_000, aligned(1000)) == 1024


def test_a_bucket_below_a_vector_is_refused() -> None:
    with pytest.raises(RuleError, match="bucket_params is at least 64"):
        bucket_capacity(63, 1000)
