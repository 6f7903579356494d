"""SCO: checkpoint boundaries wait for backward in host memory.

A session watches what a stack of checkpointed blocks saves. The input of a block (a boundary, N·H·b bytes) goes
to a slab of locked host memory while its block computes, whole, in forward order, while it fits the budget; the
last one stays. In backward, while block ℓ recomputes, boundary ℓ-1 is on its way back: at most two restored
boundaries are on the device. The blocks are not changed, and the result is the same bit for bit.

    session = OffloadSession(8 << 30, ranks=ProcessRanks(), boundary_bytes=N * H * 2, boundaries=47)
    for batch in data:
        with session:
            loss = model(batch)      # torch.utils.checkpoint inside, in either form
        loss.backward()
    session.close()
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from operators.agreement import agree_min
from operators.bounds.checkpoint_offload import locked_bytes, offloaded_count
from operators.checkpoint_offload_boundary import Boundary, Call, Claim, Forward, boundary_call, may_leave
from operators.checkpoint_offload_slots import BoundarySlab
from operators.errors import RuleError
from operators.pinned_slab import page_rounded
from operators.ranks import Ranks

OPERATOR_VERSION = 1  # raised by hand when the schedule changes
_AHEAD = 2  # the block that recomputes, and the one before it
_PACK_DEPTH = 3  # boundary_call <- _keep <- pack hook <- who saves


@dataclass(frozen=True, slots=True)
class OffloadReport:
    """What a session did, from its beginning."""

    blocks: int
    """Checkpointed blocks of the last finished forward, as far as they kept a boundary."""
    boundaries: int
    """Tensors they kept: one a block, more where a block has several inputs of size."""
    offloaded: int
    """How many of them went to the host and left the device."""
    locked_bytes: int
    """Host bytes the slab locks, whether used or not."""
    used_bytes: int
    """Host bytes in use now."""
    most_restored: int
    """Most blocks whose restored boundaries were on the device at one time."""
    reloads: int
    prefetched: int
    """Reloads that were under way before their block asked."""


class OffloadSession:
    """A context around the forward of any stack of checkpointed blocks.

    Building a session without ``slab`` reserves its host memory, a collective of ``ranks``: nothing is allocated
    or locked on the host afterwards. Enter it for each forward (several forwards may be under way); backward may
    run inside or outside. Forwards without gradient pass through untouched, and so does what is recomputed in
    backward. A dropped graph, or an exception, gives its host memory back.

    With ``boundary_bytes`` and ``boundaries`` the slab is exactly the page-rounded boundary times the number
    that fits, the smallest such number of any rank; without them it is the smallest budget of any rank.

    Args:
        host_budget_bytes: locked host bytes this rank may use; with ``slab``, this session's share of it.
        ranks: the group that agrees on the budget before the step.
        slab: share this slab; its group and device are used.
        boundary_bytes: bytes of one boundary on this rank, N·H·b.
        boundaries: checkpointed blocks of one forward (L_b). Found out in the first forward if not given.
        device: where the blocks run; the current CUDA device, or the CPU without CUDA.
        min_bytes: smaller block inputs stay on the device; half of ``boundary_bytes``, or 1 MiB without it.
        select: also asked, with the block input, whether a tensor may go (say, to leave some out).

    Raises:
        RuleError: on all ranks alike, if the budget is negative or host memory could not be reserved.
    """

    def __init__(
        self,
        host_budget_bytes: int,
        *,
        ranks: Ranks | None = None,
        slab: BoundarySlab | None = None,
        boundary_bytes: int | None = None,
        boundaries: int | None = None,
        device: torch.device | str | None = None,
        min_bytes: int | None = None,
        select: Callable[[Tensor], bool] | None = None,
    ) -> None:
        self._owns_slab = slab is None
        if slab is None:
            slab = _own_slab(host_budget_bytes, ranks, boundary_bytes, boundaries, _device(device))
            host_budget_bytes = slab.locked_bytes
        elif ranks is not None or device is not None:
            raise RuleError(
                rule="a shared slab brings its own ranks and device",
                value=(ranks, device),
                remedy="Pass ranks and device to BoundarySlab instead.",
            )
        self._slab = slab
        self._lane = slab.lane
        slab.claim(self, host_budget_bytes, self._settle)
        self._boundaries = boundaries
        self._learned: int | None = None
        if min_bytes is None:
            min_bytes = 1 << 20 if boundary_bytes is None else max(1, boundary_bytes // 2)
        self._min_bytes = min_bytes
        self._select = select
        self._hooks: list[saved_tensors_hooks] = []
        self._lock = threading.RLock()  # backward runs on autograd's own thread
        self._forward = Forward()
        self._call: Call | None = None
        self._leaving: list[Boundary] = []  # copied, or being copied, and still held
        self._ended: deque[Claim] = deque()  # appended by finalizers, from wherever they run
        self._alive: weakref.WeakSet[Boundary] = weakref.WeakSet()
        self._restored: list[tuple[StorageWeakRef, tuple[int, int]]] = []
        self._most_restored = self._reloads = self._prefetched = 0
        self._last = (0, 0, 0)
        self._closed = False

    @property
    def slab(self) -> BoundarySlab:
        return self._slab

    def report(self) -> OffloadReport:
        """What the session did so far."""
        with self._lock:
            self._take_back()
            blocks, boundaries, offloaded = self._last
            return OffloadReport(
                blocks=blocks,
                boundaries=boundaries,
                offloaded=offloaded,
                locked_bytes=self._slab.locked_bytes,
                used_bytes=self._slab.used(self),
                most_restored=self._most_restored,
                reloads=self._reloads,
                prefetched=self._prefetched,
            )

    def __enter__(self) -> OffloadSession:
        if self._closed:
            raise RuleError(rule="a closed session cannot be entered", value=None, remedy="Build a new one.")
        with self._lock:
            self._take_back()
            self._end_forward()
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._hooks.append(hooks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.pop().__exit__(kind, error, trace)
        with self._lock:
            self._end_forward()
            self._take_back()

    def close(self) -> None:
        """Give the share back, and unlock the slab if it is this session's own. Safe to call twice.

        Graphs that are still alive keep their boundaries and can still run backward.
        """
        with self._lock:
            if self._closed:
                return
            self._end_forward()
            self._take_back()
            self._closed = True
            self._slab.resign(self)
            if self._owns_slab:
                self._slab.close()

    # -- forward ---------------------------------------------------------------------------------------------

    def _pack(self, x: Tensor) -> Tensor | Boundary:
        # What backward saves (a nested checkpoint of a recomputed block) is needed again at once.
        if torch._C._current_graph_task_id() != -1:
            return x
        return self._keep(x)

    def _keep(self, x: Tensor) -> Tensor | Boundary:
        call = boundary_call(x, _PACK_DEPTH)
        if call is None:
            return x
        origin = call.origin
        if not may_leave(x, origin, self._lane.device, self._min_bytes):
            return x
        if self._select is not None and not self._select(x if origin is None else origin):
            return x
        with self._lock:
            self._take_back()
            return self._known(x) or self._admit(x, Call(call.args_id, call.place, None))

    def _known(self, x: Tensor) -> Boundary | None:
        """The boundary this forward already has for the same tensor."""
        if not self._forward.open:
            return None
        for ref in reversed(self._forward.boundaries):
            boundary = ref()
            if boundary is not None and boundary.is_of(x):
                return boundary
        return None

    def _admit(self, x: Tensor, call: Call) -> Boundary:
        new_block = not call.continues(self._call)
        if not self._forward.open or (new_block and self._forward.groups == self._boundaries):
            self._end_forward()
            self._forward = Forward()
            new_block = True
        forward = self._forward
        if new_block:
            # The block before has been issued: its input, copied meanwhile, leaves the device.
            self._let_go()
            forward.groups += 1
        self._call = call
        index = len(forward.boundaries)
        boundary = Boundary(x, forward, index)
        forward.boundaries.append(weakref.ref(boundary))
        self._alive.add(boundary)
        known = self._boundaries if self._boundaries is not None else self._learned
        room = None if forward.groups == known else self._slab.take(self, boundary.nbytes)
        if room is not None:
            claim = boundary.claim
            claim.start = room
            if boundary.fake is None:
                claim.piece = self._slab.view(room, boundary.nbytes)
                claim.mark = self._lane.to_host(x, claim.piece)
            self._leaving.append(boundary)
        end = weakref.finalize(boundary, self._ended.append, boundary.claim)
        end.atexit = False
        return boundary

    def _let_go(self) -> None:
        stream = self._lane.compute_stream()
        for boundary in self._leaving:
            # From here on the memory may be reused, in stream order, by what is computed next.
            boundary.claim.mark.wait(stream)
            boundary.let_go()
            self._forward.offloaded += 1
        self._leaving.clear()

    def _end_forward(self) -> None:
        """Backward begins, or another forward: what has not left yet stays on the device."""
        forward = self._forward
        self._call = None
        if not forward.open:
            return
        forward.open = False
        for boundary in self._leaving:
            # Its copy may still run; whatever goes to the same piece later comes behind it in the lane.
            self._free(boundary.claim)
        self._leaving.clear()
        if not forward.boundaries:
            return
        self._learned = forward.groups
        self._last = (forward.groups, len(forward.boundaries), forward.offloaded)
        wanted = sum(page_rounded(b.nbytes) for b in self._alive if b.group < b.forward.groups)
        self._slab.wish(self, wanted)

    # -- backward --------------------------------------------------------------------------------------------

    def _unpack(self, kept: Tensor | Boundary) -> Tensor:
        if not isinstance(kept, Boundary):
            return kept
        with self._lock:
            self._take_back()
            self._end_forward()
            kept.check()
            if kept.stale:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace "
                    f"operation: the input of checkpointed block {kept.index}, while it was being offloaded. "
                    "Clone it before writing to it."
                )
            x = kept.held if kept.held is not None else self._restore(kept)
            self._prefetch_before(kept)
            return x

    def _restore(self, boundary: Boundary) -> Tensor:
        claim = boundary.claim
        stream = self._lane.compute_stream()
        x = claim.prefetched
        if x is not None:
            claim.prefetched = None
            self._prefetched += 1
        else:
            x = boundary.last() if boundary.last is not None else None
            if x is not None:
                return x  # asked for twice in one block
            x = self._reload(boundary)
        claim.mark.wait(stream)
        claim.stream = stream
        boundary.last = weakref.ref(x)
        return x

    def _reload(self, boundary: Boundary) -> Tensor:
        claim = boundary.claim
        x, claim.mark = self._lane.to_device(claim.piece, boundary.layout, boundary.fake)
        self._reloads += 1
        block = (id(boundary.forward), boundary.group)
        self._restored.append((StorageWeakRef(x.untyped_storage()), block))
        self._most_restored = max(self._most_restored, len(self._blocks_restored()))
        return x

    def _blocks_restored(self) -> set[tuple[int, int]]:
        self._restored = [(storage, block) for storage, block in self._restored if not storage.expired()]
        return {block for _, block in self._restored}

    def _prefetch_before(self, boundary: Boundary) -> None:
        """Start bringing back the inputs of the block before, if two blocks' inputs may be on the device."""
        forward = boundary.forward
        group: int | None = None
        for ref in reversed(forward.boundaries[: boundary.index]):
            earlier = ref()
            if earlier is None or earlier.group == boundary.group:
                continue
            if group is None:
                group = earlier.group
            if earlier.group != group:
                return
            if (
                earlier.held is not None
                or earlier.claim.prefetched is not None
                or earlier.claim.start is None
            ):
                continue
            if earlier.last is not None and earlier.last() is not None:
                continue
            blocks = self._blocks_restored() | {(id(forward), group)}
            if len(blocks) > _AHEAD:
                return
            earlier.claim.stream = self._lane.compute_stream()
            earlier.claim.prefetched = self._reload(earlier)

    # -- host memory -----------------------------------------------------------------------------------------

    def _take_back(self) -> None:
        """Free what boundaries that came to their end had claimed."""
        while self._ended:
            claim = self._ended.popleft()
            if claim.prefetched is not None:
                claim.mark.wait(claim.stream)  # the copy into it may still run
                claim.prefetched = None
            self._free(claim)

    def _settle(self) -> None:
        with self._lock:
            self._end_forward()
            self._take_back()

    def _free(self, claim: Claim) -> None:
        if claim.start is not None:
            self._slab.give(self, claim.start, claim.nbytes)
            claim.start = claim.piece = None


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _own_slab(
    budget: int,
    ranks: Ranks | None,
    boundary_bytes: int | None,
    boundaries: int | None,
    device: torch.device,
) -> BoundarySlab:
    if boundary_bytes is None or boundaries is None:
        return BoundarySlab(budget, ranks=ranks, device=device)
    if min(budget, boundary_bytes, boundaries) < 0:
        count = -1  # refused below, by all ranks
    elif boundary_bytes == 0:
        count = boundaries  # a rank without tokens does not limit the others
    else:
        count = offloaded_count(
            boundary_bytes=boundary_bytes, boundaries=boundaries, host_budget_bytes=budget
        )
    # Ranks with other token counts have other boundary sizes: what they agree on is the number.
    count = agree_min(ranks, count, device=device)
    nbytes = -1 if count < 0 else locked_bytes(boundary_bytes=boundary_bytes, offloaded=count)
    return BoundarySlab(nbytes, ranks=ranks, device=device, same_on_all=False)
