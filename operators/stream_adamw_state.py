"""Masters and moments of every parameter, bucket by bucket in one piece of memory.

A bucket of n elements is one block ``[3, n]`` of fp32: master, first moment, second moment. One copy moves it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from operators.bounds.stream_adamw import STATE_BYTES
from operators.errors import RuleError
from operators.flat_buckets import Bucket

STATE_NAMES = ("master", "exp_avg", "exp_avg_sq")


class FlatState:
    """The state of ``buckets`` in ``memory``.

    Args:
        memory: ``[>= 12 · length]`` uint8, on the host or the device; zeroed here.
        length: elements of the flat line.
        buckets: a partition of the flat line.
        params: how many parameters there are.
    """

    def __init__(self, memory: Tensor, length: int, buckets: Sequence[Bucket], params: int) -> None:
        self._memory = memory[: STATE_BYTES * length].view(torch.float32)
        self._memory.zero_()
        self._pieces: list[list[tuple[int, int, Bucket, int]]] = [[] for _ in range(params)]
        for bucket in buckets:
            for segment in bucket.segments:
                self._pieces[segment.param].append((segment.start, segment.stop, bucket, segment.offset))

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def block(self, bucket: Bucket) -> Tensor:
        """``[3, n]`` fp32: master, first and second moment of a bucket."""
        return self._memory[3 * bucket.offset : 3 * (bucket.offset + bucket.size)].view(3, bucket.size)

    def gather(self, param: int, name: str, out: Tensor) -> None:
        """One state of one parameter into ``out``, contiguous fp32 of the parameter's size."""
        flat = out.view(-1)
        for start, stop, piece in self._parts(param, name):
            flat[start:stop].copy_(piece)

    def scatter(self, param: int, name: str, value: Tensor) -> None:
        """Write one state of one parameter from ``[size]``."""
        for start, stop, piece in self._parts(param, name):
            piece.copy_(value[start:stop])

    def clear(self, param: int) -> None:
        """Zero every state of one parameter."""
        for name in STATE_NAMES:
            for _, _, piece in self._parts(param, name):
                piece.zero_()

    def _parts(self, param: int, name: str) -> Iterator[tuple[int, int, Tensor]]:
        row = STATE_NAMES.index(name)
        for start, stop, bucket, offset in self._pieces[param]:
            yield start, stop, self.block(bucket)[row, offset : offset + stop - start]


def host_memory_of(given: Tensor, nbytes: int) -> Tensor:
    """Check host memory that a caller lends.

    Raises:
        RuleError: it is not a flat uint8 host tensor of at least ``nbytes``.
    """
    if given.dtype != torch.uint8 or given.dim() != 1 or given.device.type != "cpu" or given.numel() < nbytes:
        raise RuleError(
            rule=f"host_memory is a flat uint8 tensor on the host with at least {nbytes} bytes",
            value=(given.dtype, tuple(given.shape), str(given.device)),
            remedy="Take it from a PinnedSlab of that size, or leave host_memory unset.",
        )
    return given[:nbytes]
