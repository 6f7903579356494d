"""Copies between a device and the slab, beside the compute stream.

One lane has one stream for both directions. So a reload can never overtake the write it depends on, and a slab
piece is never overwritten before it was read: the order of the stream is the proof. No call here waits on the
host. On the CPU, and for fake tensors, the same calls copy at once, or nothing.

Device memory never needs ``record_stream``: a tensor is held until the compute stream has been told to wait for
the copy that uses it, and its memory can then be reused in stream order however far the host runs ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_ALIGN = 64  # kernels choose their path by the alignment of a pointer; a reload keeps it


@dataclass(frozen=True, slots=True)
class Layout:
    """How a dense tensor lies in memory: enough to lay it out again, bit for bit and stride for stride."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    lead: int
    """Elements its start lies past a 64-byte line."""

    @classmethod
    def of(cls, x: Tensor) -> Layout:
        lead = 0 if isinstance(x, FakeTensor) else x.data_ptr() % _ALIGN // x.element_size()
        return cls(tuple(x.shape), tuple(x.stride()), x.dtype, x.device, lead)


class Mark:
    """A point in the lane. ``wait`` orders the given stream (not the host) behind it."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def wait(self, stream: torch.cuda.Stream | None) -> None:
        if self._event is not None and stream is not None:
            stream.wait_event(self._event)


class CopyLane:
    """The copies of one device. ``stream`` is None where copies are synchronous (CPU)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def compute_stream(self) -> torch.cuda.Stream | None:
        """The stream the caller computes on."""
        return torch.cuda.current_stream(self.device) if self.stream is not None else None

    @torch.no_grad()
    def to_host(self, x: Tensor, piece: Tensor) -> Mark:
        """Copy dense ``x`` into ``piece`` (``[bytes]`` uint8) after what the compute stream has queued.

        The caller keeps ``x`` alive until a ``wait`` of the returned mark was queued on the compute stream.
        """
        source = x.detach().as_strided((x.numel(),), (1,))
        target = piece.view(x.dtype)
        if self.stream is None:
            target.copy_(source)
            return Mark(None)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            return Mark(self.stream.record_event())

    @torch.no_grad()
    def to_device(
        self, piece: Tensor | None, layout: Layout, fake: FakeTensorMode | None
    ) -> tuple[Tensor, Mark]:
        """A new tensor of ``layout`` filled from ``piece``, and the mark to wait for before using it.

        In a dry run ``fake`` makes it, and there is no piece.
        """
        if fake is not None:
            with fake:
                x = torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=layout.device)
            return x, Mark(None)
        assert piece is not None
        source = piece.view(layout.dtype)
        if layout.lead:
            room = torch.empty(layout.lead + source.numel(), dtype=layout.dtype, device=layout.device)
            x = room.as_strided(layout.size, layout.stride, layout.lead)
        else:
            x = torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=layout.device)
        target = x.as_strided((source.numel(),), (1,))
        if self.stream is None:
            target.copy_(source)
            return x, Mark(None)
        # The memory just handed out may still be in use by what the compute stream has queued.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            return x, Mark(self.stream.record_event())


def is_dense(x: Tensor) -> bool:
    """Whether ``x`` fills one stretch of memory without holes or overlaps, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return x.numel() > 0
