"""The host side of SCO: one slab, its free pieces, and the share each session may use.

All sizes are whole pages, so that bytes counted are bytes locked.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from types import TracebackType

import torch
from torch import Tensor

from operators.agreement import agree_max, agree_min, all_or_none, wanted_on_this_host
from operators.checkpoint_offload_lane import CopyLane
from operators.errors import RuleError
from operators.pinned_slab import PAGE_BYTES, PinnedSlab, available_host_bytes, page_rounded
from operators.ranks import Ranks


class FreeList:
    """First fit over ``[0, nbytes)`` in whole pages; neighbours merge when they come back."""

    def __init__(self, nbytes: int) -> None:
        self._pieces: list[tuple[int, int]] = [(0, nbytes)] if nbytes else []  # (start, size), by start

    @property
    def free_bytes(self) -> int:
        return sum(size for _, size in self._pieces)

    def take(self, nbytes: int) -> int | None:
        """Start of ``nbytes`` (rounded to the page), or None where no piece is large enough."""
        nbytes = page_rounded(nbytes)
        for i, (start, size) in enumerate(self._pieces):
            if size >= nbytes:
                rest = [(start + nbytes, size - nbytes)] if size > nbytes else []
                self._pieces[i : i + 1] = rest
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        """Take back what :meth:`take` handed out."""
        size = page_rounded(nbytes)
        at = bisect_left(self._pieces, (start, 0))
        if at < len(self._pieces) and self._pieces[at][0] == start + size:
            size += self._pieces.pop(at)[1]
        if at and sum(self._pieces[at - 1]) == start:
            start, before = self._pieces.pop(at - 1)
            size += before
        insort(self._pieces, (start, size))


class BoundarySlab:
    """Locked host memory for boundaries, reserved once and shared by sessions.

    Building one is a collective of ``ranks``: the ranks of a host are checked together against what that host
    has, and either all ranks hold their slab or all raise. The slab has one copy lane, whose order is what
    makes a piece safe to reuse, whichever session used it before.

    Args:
        nbytes: locked bytes wanted on this rank; rounded down to the page.
        ranks: the group that has to agree; None for a process of its own.
        device: the device whose boundaries come here, and where the agreement's tensors live.
        same_on_all: reserve the smallest size any rank asked for; otherwise each rank its own.

    Raises:
        RuleError: the same text on every rank, naming host memory, if one rank could not reserve.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        ranks: Ranks | None = None,
        device: torch.device | str = "cpu",
        same_on_all: bool = True,
    ) -> None:
        self.ranks = ranks
        self.device = torch.empty(0, device=device).device  # "cuda" with its index
        # A bad value on one rank must not keep it out of the collective: it is refused by all.
        least = agree_min(ranks, nbytes, device=self.device)
        if least < 0:
            raise RuleError(
                rule="a host budget is at least 0 bytes on every rank, and so are boundary_bytes and boundaries",
                value=least,
                remedy="Use 0 for none.",
            )
        agreed = (least if same_on_all else nbytes) // PAGE_BYTES * PAGE_BYTES
        together = wanted_on_this_host(ranks, agreed, device=self.device)
        self._slab = all_or_none(
            ranks,
            lambda: _reserve(agreed, together),
            undo=PinnedSlab.close,
            what=f"reserving {agreed} bytes of host memory for checkpoint boundaries",
            device=self.device,
        )
        self.lane = CopyLane(self.device)
        self._free = FreeList(self._slab.nbytes)
        self._quotas: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._used: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._demand: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._settle: list[weakref.WeakMethod[Callable[[], None]]] = []

    @property
    def locked_bytes(self) -> int:
        """Host bytes locked: the agreed budget to the page, whether used or not."""
        return self._slab.locked_bytes

    @property
    def free_bytes(self) -> int:
        return self._free.free_bytes

    @property
    def unassigned_bytes(self) -> int:
        """Bytes no session has a claim to."""
        return self._slab.nbytes - sum(self._quotas.values())

    def quota(self, owner: object) -> int:
        """Locked bytes ``owner`` may use."""
        return self._quotas[owner]

    def used(self, owner: object) -> int:
        """Locked bytes ``owner`` uses now."""
        return self._used[owner]

    def claim(self, owner: object, nbytes: int, settle: Callable[[], None] | None = None) -> None:
        """Give ``owner`` a share of at most ``nbytes`` locked bytes.

        Args:
            settle: a method of ``owner`` that gives back what it no longer needs; called before shares change.

        Raises:
            RuleError: the shares would exceed the slab.
        """
        if not 0 <= nbytes <= self.unassigned_bytes:
            raise RuleError(
                rule=f"sessions share {self._slab.nbytes} locked bytes, {self.unassigned_bytes} are unclaimed",
                value=nbytes,
                remedy="Claim less, build a larger slab, or close a session.",
            )
        self._quotas[owner], self._used[owner], self._demand[owner] = nbytes, 0, 0
        if settle is not None:
            self._settle.append(weakref.WeakMethod(settle))

    def resign(self, owner: object) -> None:
        """Give the share back. Pieces still in use return through :meth:`give` as before."""
        self._quotas[owner] = 0

    def wish(self, owner: object, nbytes: int) -> None:
        """Note what ``owner`` could have used in a step; :meth:`rebalance` goes by the largest wish."""
        self._demand[owner] = max(self._demand[owner], nbytes)

    def take(self, owner: object, nbytes: int) -> int | None:
        """Start of a page-aligned piece, or None if the share or the slab has no room for it."""
        size = page_rounded(nbytes)
        if self._slab.closed or self._used[owner] + size > self._quotas[owner]:
            return None
        start = self._free.take(size)
        if start is None:
            return None
        self._used[owner] += size
        return start

    def view(self, start: int, nbytes: int) -> Tensor:
        """The memory of a piece, ``[nbytes]`` uint8. It stays readable after :meth:`close`."""
        return self._slab.buffer[start : start + nbytes]

    def give(self, owner: object, start: int, nbytes: int) -> None:
        """Take a piece back."""
        self._free.give(start, nbytes)
        if owner in self._used:
            self._used[owner] -= page_rounded(nbytes)

    def rebalance(self) -> Mapping[object, int]:
        """Share the slab out again by what the sessions could have used. A collective, between steps.

        Every session gets what it wished for while that fits; otherwise all get the same fraction of it.
        The wishes are the largest of any rank, so all ranks come to the same shares. Wishes start anew.

        Raises:
            RuleError: a session holds boundaries (on any rank; raised on all).
        """
        for method in self._settle:
            settle = method()
            if settle is not None:  # its graphs may be gone without its having looked since
                settle()
        owners = list(self._quotas)  # in the order of their claims, the same on all ranks
        held = agree_max(self.ranks, sum(self._used[o] for o in owners), device=self.device)
        if held:
            raise RuleError(
                rule="a slab is rebalanced between steps, when no boundary is on the host",
                value=held,
                remedy="Run backward (or drop the graph) of every session first.",
            )
        wishes = [agree_max(self.ranks, self._demand[o], device=self.device) for o in owners]
        total = sum(wishes)
        for owner, wish in zip(owners, wishes, strict=True):
            if total > self._slab.nbytes:
                wish = self._slab.nbytes * wish // total // PAGE_BYTES * PAGE_BYTES  # noqa: PLW2901
            self._quotas[owner], self._demand[owner] = wish, 0
        return dict(self._quotas)

    def close(self) -> None:
        """Unlock the memory. Boundaries still on it stay readable until their graph is dropped."""
        self._slab.close()

    def __enter__(self) -> BoundarySlab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _reserve(nbytes: int, together: int) -> PinnedSlab:
    available = available_host_bytes()
    if available is not None and together > available:
        raise RuleError(
            rule=f"the ranks of this host may lock at most its available host memory ({available} bytes)",
            value=together,
            remedy="Lower the host budget, or put fewer ranks on the host.",
        )
    return PinnedSlab(nbytes)
