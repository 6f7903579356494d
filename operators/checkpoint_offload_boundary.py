"""Which saved tensors are checkpoint boundaries, and what is kept of each.

``torch.utils.checkpoint`` keeps a block's inputs as saved tensors in both its forms (non-reentrant: a
``SavedTensor``, or a ``_NoopSaveInputs`` node before torch 2.13; reentrant: ``CheckpointFunction``), so they pass
through ``saved_tensors_hooks`` like any other. What tells them apart is who saves them: the calling frame.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass, field
from types import FrameType

import torch
import torch.autograd.function
import torch.utils.checkpoint
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from operators.checkpoint_offload_lane import Layout, Mark, is_dense

_CHECKPOINT_FILE = torch.utils.checkpoint.__file__
_FUNCTION_FILE = torch.autograd.function.__file__


@dataclass(frozen=True, slots=True)
class Call:
    """One call that saves block inputs: its arguments' identity and the place of the tensor among them."""

    args_id: int
    place: int
    origin: Tensor | None

    def continues(self, before: Call | None) -> bool:
        """Whether ``before`` saved an earlier argument of the same call."""
        # A tuple's address may be reused by a later call, which then starts again from the left.
        return before is not None and before.args_id == self.args_id and before.place < self.place


def boundary_call(x: Tensor, depth: int) -> Call | None:
    """The checkpoint call that saves ``x``, seen ``depth`` frames up; None if ``x`` is no block input.

    Besides ``torch.utils.checkpoint`` any ``torch.autograd.Function`` with the attribute
    ``saves_boundary = True`` counts: one that keeps its input and recomputes the rest.
    """
    frame: FrameType | None = sys._getframe(depth)
    if frame is None:
        return None
    file = frame.f_code.co_filename
    if file == _FUNCTION_FILE:
        cls = frame.f_locals.get("cls")
        ours = getattr(cls, "saves_boundary", False)
        if not ours and getattr(cls, "__module__", None) != torch.utils.checkpoint.__name__:
            return None
    elif file == _CHECKPOINT_FILE:
        if "args" not in frame.f_locals:  # a comprehension is a frame of its own before Python 3.12
            frame = frame.f_back
    else:
        return None
    args = frame.f_locals.get("args", ()) if frame is not None else ()
    for place, arg in enumerate(args):
        if isinstance(arg, Tensor) and _same(arg, x):
            return Call(id(args), place, arg)
    return Call(id(args), len(args), None)


def _same(a: Tensor, b: Tensor) -> bool:
    return (
        a.untyped_storage()._cdata == b.untyped_storage()._cdata
        and a.storage_offset() == b.storage_offset()
        and a.shape == b.shape
    )


def may_leave(x: Tensor, origin: Tensor | None, device: torch.device, min_bytes: int) -> bool:
    """Whether offloading ``x`` can free memory and bring back the same tensor.

    Leaves stay where they are: parameters and others that require grad are kept alive by autograd itself,
    those that do not (masks, positions, tables) are shared by all blocks. So do small tensors, subclasses such
    as DTensor, and views with holes or overlaps.
    """
    if type(x) is not Tensor and not isinstance(x, FakeTensor):
        return False
    if x.device.type != device.type or (x.device.index or 0) != (device.index or 0):
        return False
    if origin is not None and origin.is_leaf:
        return False
    return x.layout == torch.strided and x.numel() * x.element_size() >= min_bytes and is_dense(x)


@dataclass(slots=True)
class Claim:
    """What a boundary occupies; outlives it until the session takes it back."""

    start: int | None = None
    """Where on the slab; None if nowhere."""
    nbytes: int = 0
    piece: Tensor | None = None
    """The memory there; None in a dry run."""
    prefetched: Tensor | None = None
    mark: Mark = field(default_factory=lambda: Mark(None))
    stream: torch.cuda.Stream | None = None


class Forward:
    """The boundaries of one forward, in order; autograd owns them."""

    def __init__(self) -> None:
        self.boundaries: list[weakref.ref[Boundary]] = []
        self.groups = 0
        """Blocks so far: the inputs of one block are a group."""
        self.offloaded = 0
        self.open = True


class Boundary:
    """One block input. Autograd holds it in place of the tensor; its end frees what it claimed."""

    def __init__(self, x: Tensor, forward: Forward, index: int) -> None:
        self.forward, self.index, self.group = forward, index, forward.groups
        self.layout = Layout.of(x)
        self.nbytes = x.numel() * x.element_size()
        self.held: Tensor | None = x
        self.claim = Claim(nbytes=self.nbytes)
        self.fake = x.fake_mode if isinstance(x, FakeTensor) else None
        self.stale = False
        self._version = x._version
        self._offset = x.storage_offset()
        self._storage = StorageWeakRef(x.untyped_storage())
        self.last: weakref.ref[Tensor] | None = None
        """The tensor handed out last, while it lives."""

    def is_of(self, x: Tensor) -> bool:
        """Whether ``x`` is this very tensor, unchanged since."""
        # A storage that expired may have given its address to another one.
        return (
            not self._storage.expired()
            and self._storage.cdata == StorageWeakRef(x.untyped_storage()).cdata
            and self._offset == x.storage_offset()
            and self._version == x._version
            and (self.layout.size, self.layout.stride, self.layout.dtype)
            == (tuple(x.shape), tuple(x.stride()), x.dtype)
        )

    def let_go(self) -> None:
        """Drop the device copy. The compute stream has to be behind the copy to the host by now."""
        self.check()
        self.held = None

    def check(self) -> None:
        """Note whether the tensor was written to while it was still held."""
        if self.held is not None and self.held._version != self._version:
            self.stale = True
