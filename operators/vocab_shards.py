"""Vocabulary intervals: which rank of a vocabulary group holds which rows of the head.

The first ranks hold ⌈V/P⌉ rows each; the last one with rows holds what is left; ranks behind it hold none
(V = 37 on P = 4 gives 10, 10, 10, 7; V = 2 on P = 4 gives 1, 1, 0, 0). No padding row exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from operators.errors import RuleError


def shard_interval(vocab: int, vocab_ranks: int, rank: int) -> tuple[int, int]:
    """Half-open interval of vocabulary ids that ``rank`` of ``vocab_ranks`` holds; may be empty.

    Raises:
        RuleError: a negative vocabulary, no ranks, or a rank outside the group.
    """
    if vocab < 0 or vocab_ranks < 1 or not 0 <= rank < vocab_ranks:
        raise RuleError(
            rule="a vocabulary shard needs vocab >= 0, ranks >= 1 and 0 <= rank < ranks",
            value=(vocab, vocab_ranks, rank),
            remedy="Pass the size of the vocabulary group and this process's place in it.",
        )
    rows = -(-vocab // vocab_ranks)
    return min(rank * rows, vocab), min((rank + 1) * rows, vocab)


@dataclass(frozen=True, slots=True)
class VocabShards:
    """The shards as the ranks really hold them: any sizes, in rank order."""

    rows: tuple[int, ...]
    """Rows of the head on each rank."""

    @classmethod
    def even(cls, vocab: int, vocab_ranks: int) -> VocabShards:
        """The shards of :func:`shard_interval`."""
        intervals = [shard_interval(vocab, vocab_ranks, r) for r in range(vocab_ranks)]
        return cls(tuple(stop - start for start, stop in intervals))

    @classmethod
    def of(cls, rows: Sequence[int]) -> VocabShards:
        return cls(tuple(rows))

    @property
    def vocab(self) -> int:
        """V, the sum of the shards."""
        return sum(self.rows)

    @property
    def starts(self) -> tuple[int, ...]:
        """First vocabulary id of each shard."""
        return tuple(accumulate(self.rows, initial=0))[:-1]
