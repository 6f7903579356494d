"""How a tensor travels the ring, alone or with its gradient.

In round i rank r holds the mover of rank (r − i) mod P: every hop sends to rank + 1. The next mover is on its
way while the current one is in use. A gradient that travels along is summed where its mover is, and after
round P − 1 makes one more hop, home.

Memory, for movers of at most M bytes (the widest of mover and gradient): the forward needs the home tensor
and 2 slots; the backward 3 slots with the gradient's hop ``serial`` (after the round, exposed) and 4 with it
``overlapped`` (during the next round's logits). The last slot of a serial gradient becomes the result.
Every rank issues the same hops in the same order whatever the sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from operators.ranks import Pending, Ranks

GradientHop = Literal["serial", "overlapped"]


class _Slots:
    """Equal raw buffers that take turns; made on first need, reused after ``give``."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._nbytes = nbytes
        self._device = device
        self._free: list[Tensor] = []

    def take(self) -> Tensor:
        if self._free:
            return self._free.pop()
        return torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)

    def give(self, slot: Tensor | None) -> None:
        if slot is not None:
            self._free.append(slot)

    def clear(self) -> None:
        self._free.clear()


def _shaped(slot: Tensor, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    nbytes = rows * width * dtype.itemsize
    return slot[:nbytes].view(dtype).view(rows, width)


def owner_in_round(ranks: Ranks, turn: int) -> int:
    """Whose mover this rank holds in round ``turn``."""
    return (ranks.rank - turn) % ranks.size


def rounds(ranks: Ranks, home_RH: Tensor, rows: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """The P rounds of a mover without a gradient: ``(owner, mover)``.

    Args:
        home_RH: this rank's mover, ``[rows[rank], H]``, contiguous; never written.
        rows: rows of every rank's mover.
    """
    width, dtype = home_RH.shape[1], home_RH.dtype
    slots = _Slots(max(rows) * width * dtype.itemsize, home_RH.device)
    here, slot = home_RH, None
    for turn in range(ranks.size):
        last = turn == ranks.size - 1
        if not last:
            next_slot = slots.take()
            following = _shaped(next_slot, rows[owner_in_round(ranks, turn + 1)], width, dtype)
            hop = ranks.shift(here, following)
        yield owner_in_round(ranks, turn), here
        if not last:
            hop.wait()
            slots.give(slot)
            here, slot = following, next_slot


@dataclass(slots=True)
class Round:
    """One round of a mover that its gradient follows. Holds the mover only until the next round."""

    owner: int
    mover: Tensor
    gradient: Callable[[], Tensor]
    """The travelling sum for this mover; the first call waits for its arrival."""

    def close(self) -> None:
        """Let go of the slots, even if the caller keeps the round."""
        self.mover = self.mover.new_empty(0)
        self.gradient = _gone


class GradientRing:
    """The P rounds of a mover with its gradient; ``result`` is the home gradient afterwards.

    Args:
        home_RH: this rank's mover, ``[rows[rank], H]``, contiguous; never written.
        rows: rows of every rank's mover.
        dtype: of the gradient while it travels.
        hop: ``serial`` or ``overlapped``.
    """

    def __init__(
        self, ranks: Ranks, home_RH: Tensor, rows: Sequence[int], dtype: torch.dtype, *, hop: GradientHop
    ) -> None:
        self._ranks, self._home, self._rows = ranks, home_RH, rows
        self._width, self._dtype, self._overlapped = home_RH.shape[1], dtype, hop == "overlapped"
        widest = max(home_RH.dtype.itemsize, dtype.itemsize)
        self._slots = _Slots(max(rows) * self._width * widest, home_RH.device)
        self._result: Tensor | None = None

    @property
    def result(self) -> Tensor:
        """The gradient of the home mover, summed over all ranks; valid once the rounds are over."""
        assert self._result is not None
        return self._result

    def __iter__(self) -> Iterator[Round]:
        if self._ranks.size == 1:
            only = torch.zeros(self._home.shape, dtype=self._dtype, device=self._home.device)
            self._result = only
            yield Round(0, self._home, lambda: only)
            return
        last_sum = yield from self._turns()
        # the sum's own slot is all that is left when the result is made
        self._slots.clear()
        result = torch.empty(self._home.shape, dtype=self._dtype, device=self._home.device)
        self._ranks.shift(last_sum, result).wait()
        self._result = result

    def _turns(self) -> Generator[Round, None, Tensor]:
        ranks, slots = self._ranks, self._slots
        here, slot = self._home, None
        sum_slot = slots.take()
        total = self._gradient(sum_slot, 0).zero_()
        for turn in range(ranks.size):
            last = turn == ranks.size - 1
            arrival: Callable[[], Tensor]
            if self._overlapped and turn > 0:
                arriving_slot = slots.take()
                arriving = self._gradient(arriving_slot, turn)
                arrival = _Arrival(ranks.shift(total, arriving), arriving, sum_slot, slots)
                total, sum_slot = arriving, arriving_slot
            else:
                arrival = _Present(total)
            if not last:
                next_slot = slots.take()
                following = self._mover(next_slot, turn + 1)
                hop = ranks.shift(here, following)
            now = Round(owner_in_round(ranks, turn), here, arrival)
            yield now
            arrival()  # a round without tiles has not asked
            now.close()
            if last:
                break
            hop.wait()
            slots.give(slot)
            here, slot = following, next_slot
            if not self._overlapped:
                arriving_slot = slots.take()
                arriving = self._gradient(arriving_slot, turn + 1)
                ranks.shift(total, arriving).wait()
                slots.give(sum_slot)
                total, sum_slot = arriving, arriving_slot
        return total

    def _gradient(self, slot: Tensor, turn: int) -> Tensor:
        return _shaped(slot, self._rows[owner_in_round(self._ranks, turn)], self._width, self._dtype)

    def _mover(self, slot: Tensor, turn: int) -> Tensor:
        return _shaped(slot, self._rows[owner_in_round(self._ranks, turn)], self._width, self._home.dtype)


def _gone() -> Tensor:
    raise AssertionError("this round is over")


class _Present:
    """A sum that is already here."""

    def __init__(self, total: Tensor) -> None:
        self._total = total

    def __call__(self) -> Tensor:
        return self._total


class _Arrival:
    """A sum on its way: the first call waits, and frees the slot it was sent from."""

    def __init__(self, hop: Pending, total: Tensor, sent_from: Tensor | None, slots: _Slots) -> None:
        self._hop: Pending | None = hop
        self._total, self._sent_from, self._slots = total, sent_from, slots

    def __call__(self) -> Tensor:
        if self._hop is not None:
            self._hop.wait()
            self._slots.give(self._sent_from)
            self._hop = self._sent_from = None
        return self._total
