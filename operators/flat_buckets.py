"""Parameters as one flat line of elements, and its cuts into buckets.

Each parameter starts on a multiple of ``ALIGN`` elements and buckets are cut on multiples of it, so a parameter
may lie in several buckets and a bucket never holds more than it was given: the largest bucket is the bucket, not
the largest tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from operators.errors import RuleError

ALIGN = 64
"""Elements. A multiple of every CPU vector length (so that cuts do not change the last bit of the fused CPU
AdamW) and 256 bytes of fp32 (so that CUDA kernels load whole vectors)."""


@dataclass(frozen=True)
class Segment:
    """Elements ``[start, stop)`` of parameter ``param``, at ``offset`` of their bucket."""

    param: int
    start: int
    stop: int
    offset: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Bucket:
    """``size`` elements of the flat line from ``offset`` on, with what lies there."""

    offset: int
    size: int
    segments: tuple[Segment, ...]


def aligned(elements: int) -> int:
    """``elements`` rounded up to ``ALIGN``."""
    return -(-elements // ALIGN) * ALIGN


def flat_params(sizes: Sequence[int]) -> int:
    """Length of the flat line in elements: the parameters, each rounded up to ``ALIGN``."""
    return sum(aligned(n) for n in sizes)


def bucket_capacity(bucket_params: int, length: int, name: str = "bucket_params") -> int:
    """Elements a staging slot holds: ``bucket_params`` rounded down to ``ALIGN``, at most the line itself.

    Raises:
        RuleError: ``bucket_params`` is below ``ALIGN``.
    """
    if bucket_params < ALIGN:
        raise RuleError(
            rule=f"{name} is at least {ALIGN}",
            value=bucket_params,
            remedy="Five million parameters a bucket is a good start.",
        )
    return min(bucket_params // ALIGN * ALIGN, length)


def cut_buckets(sizes: Sequence[int], first: int, last: int, capacity: int) -> tuple[Bucket, ...]:
    """Buckets of at most ``capacity`` elements over ``[first, last)`` of the flat line of ``sizes``.

    Args:
        sizes: elements of each parameter, in order.
        first, last, capacity: multiples of ``ALIGN``.
    """
    starts = [0]
    for n in sizes:
        starts.append(starts[-1] + aligned(n))
    buckets = []
    for begin in range(first, last, max(capacity, 1)):
        end = min(begin + capacity, last)
        segments = []
        for param in range(bisect_right(starts, begin) - 1, len(sizes)):
            if starts[param] >= end:
                break
            start = max(begin - starts[param], 0)
            stop = min(end - starts[param], sizes[param])
            if start < stop:
                segments.append(Segment(param, start, stop, starts[param] + start - begin))
        buckets.append(Bucket(begin, end - begin, tuple(segments)))
    return tuple(buckets)


def host_boundary(length: int, host_share: float) -> int:
    """Where the host's part of the flat line ends: the first ``host_share`` of it, on ``ALIGN``."""
    return min(aligned(round(length * host_share)), length)
