"""Peak bytes of operator code, under fake tensors (a dry run) or of real tensors (tracked).

Both count *storages*: a view costs nothing, a storage costs its bytes from the operation that makes it until
its last reference dies. What a kernel allocates and frees inside one operation (a library's workspace) is not
seen, nor is allocator slack.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class PeakTracker(TorchDispatchMode):
    """Count the bytes of every storage made while it is active.

    ``with PeakTracker() as tracker: ...`` then ``tracker.peak_bytes``. Storages that existed before are not
    counted unless they are given to :meth:`adopt`. Works on real tensors of any device and on fake tensors
    (enter it *inside* the fake mode), in forward and in backward.

    Attributes:
        peak_bytes: Largest sum of live counted bytes so far.
        live_bytes: Sum of live counted bytes now.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self.live_bytes = 0
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def adopt(self, *values: object) -> None:
        """Count the storages of the tensors in ``values`` (nested containers allowed) from now on."""
        for leaf in tree_iter(values):
            if isinstance(leaf, Tensor):
                self._count(leaf)

    def reset_peak(self) -> None:
        """Start a new maximum from what is live now."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor):
                self._count(leaf, args, kwargs)
        return result

    def _count(
        self, tensor: Tensor, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known and self._known[key][0]() is storage:
            return
        for leaf in tree_iter((args, kwargs or {})):  # a view or an in-place result of an uncounted storage
            if isinstance(leaf, Tensor) and leaf.untyped_storage() is storage:
                return
        nbytes = storage.nbytes()
        self._known[key] = (weakref.ref(storage, partial(self._forget, key)), nbytes)
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, key: int, _: object) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self.live_bytes -= known[1]


@dataclass(frozen=True)
class DryRun:
    """What a dry run found, in bytes."""

    peak_bytes: int
    """Largest sum of live storages, adopted ones included."""
    live_bytes: int
    """What is still alive at the end, results included."""


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Every tensor made inside has a shape, a dtype and a storage of the right size, and no memory."""
    with FakeTensorMode():
        yield


def hollow(tensor: Tensor) -> Tensor:
    """A new tensor of the same shape and dtype: inside :func:`fake_tensors`, the stand-in of a real one."""
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def dry_run(build: Callable[[], Iterable[Any]], step: Callable[..., Any]) -> DryRun:
    """Run ``step(*build())`` under fake tensors and report its peak.

    Args:
        build: Makes the inputs (weights, activations, gradients); everything it returns is counted as live
            from the start for as long as it is referenced.
        step: Runs the operator, forward and backward, and returns what shall stay alive until the end.

    What depends on data (routing counts) must be given as plain Python numbers; fake tensors have no values.
    """
    with fake_tensors(), PeakTracker() as tracker:
        inputs = tuple(build())
        tracker.adopt(inputs)
        tracker.reset_peak()
        kept = step(*inputs)
        report = DryRun(tracker.peak_bytes, tracker.live_bytes)
        del kept
    return report
