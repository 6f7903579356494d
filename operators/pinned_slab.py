"""One host allocation, registered with the GPU driver at its exact size.

PyTorch's pinned allocator rounds every block up to a power of two (1 GiB + 1 MiB locks 2 GiB). A slab is mapped
anonymously, so it starts on a page, and registered whole: what is locked is what was asked for, rounded to the
page. Without CUDA the memory is ordinary and everything else is the same.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from operators.errors import RuleError

PAGE_BYTES = mmap.PAGESIZE
_REMEDY = "Lower the host budget, or free host memory (this is host RAM, not GPU memory)."


def page_rounded(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages: what registering them locks."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def available_host_bytes() -> int | None:
    """Host bytes this process may still take: MemAvailable, or less where a cgroup says so. None if unknown."""
    found: list[int] = []
    try:
        rows = [line.split() for line in Path("/proc/meminfo").read_text().splitlines()]
        found.extend(int(row[1]) * 1024 for row in rows if row[0] == "MemAvailable:")
    except (OSError, ValueError, IndexError):
        pass
    cgroup = Path("/sys/fs/cgroup")
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit != "max":
            stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
            # Clean file cache counts as used there but is given back under pressure.
            used = int((cgroup / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
            found.append(max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return min(found) if found else None


class PinnedSlab:
    """``nbytes`` of host memory in one piece, page-locked where CUDA is available.

    Args:
        nbytes: bytes wanted; the slab holds them rounded up to the page.
        pin: register with the CUDA driver. None: if CUDA is available.

    Raises:
        RuleError: ``nbytes`` is negative, ``pin`` is true without CUDA, or host memory could not be allocated
            or registered.
    """

    def __init__(self, nbytes: int, *, pin: bool | None = None) -> None:
        if nbytes < 0:
            raise RuleError(rule="a slab holds at least 0 bytes", value=nbytes, remedy="Ask for more bytes.")
        cuda = torch.cuda.is_available()
        if pin and not cuda:
            raise RuleError(
                rule="memory can be registered only where CUDA is available",
                value=pin,
                remedy="Leave pin unset: the slab is then ordinary memory.",
            )
        self.nbytes = page_rounded(nbytes)
        self._pinned = cuda if pin is None else pin
        self._taken = 0
        self._finalizer: weakref.finalize[Any, PinnedSlab] | None = None
        if self.nbytes == 0:
            self._buffer: Tensor | None = torch.empty(0, dtype=torch.uint8)
            self._pinned = False
            return
        memory = _map(self.nbytes)
        # The tensor, and every view of it, keeps the mapping alive; nothing ever closes it explicitly.
        self._buffer = torch.frombuffer(memory, dtype=torch.uint8)
        if self._pinned:
            # Registering touches pages on one thread; torch's threads do it first and faster.
            self._buffer.zero_()
            address = self._buffer.data_ptr()
            _register(address, self.nbytes)
            self._finalizer = weakref.finalize(self, _unregister, address, memory)

    @property
    def buffer(self) -> Tensor:
        """The whole slab, ``[nbytes]`` uint8."""
        if self._buffer is None:
            raise RuleError(rule="a closed slab has no memory", value=None, remedy="Build a new PinnedSlab.")
        return self._buffer

    @property
    def closed(self) -> bool:
        return self._buffer is None

    @property
    def is_pinned(self) -> bool:
        return self._pinned

    @property
    def locked_bytes(self) -> int:
        """Host bytes held: exactly the page-rounded size, 0 once closed."""
        return 0 if self.closed else self.nbytes

    @property
    def free_bytes(self) -> int:
        """Bytes :meth:`take` has not handed out."""
        return 0 if self.closed else self.nbytes - self._taken

    def take(self, nbytes: int, align: int = 256) -> Tensor:
        """The next ``nbytes`` as a ``[nbytes]`` uint8 view that starts on a multiple of ``align``.

        Raises:
            RuleError: the slab is closed or has not that many bytes left, or ``align`` is no power of two
                up to the page.
        """
        if align < 1 or align & (align - 1) or align > PAGE_BYTES:
            raise RuleError(
                rule=f"align is a power of two, at most {PAGE_BYTES}", value=align, remedy="Use 256."
            )
        start = -(-self._taken // align) * align
        if nbytes < 0 or start + nbytes > self.buffer.numel():
            raise RuleError(
                rule=f"a slab of {self.nbytes} bytes with {self._taken} taken has to hold what is asked for",
                value=nbytes,
                remedy="Build the slab with the sum of the page- or align-rounded parts.",
            )
        self._taken = start + nbytes
        return self.buffer[start : start + nbytes]

    def close(self) -> None:
        """Unregister the memory. Waits for the device: a copy may still be reading it. Safe to call twice.

        Views handed out stay readable as ordinary memory until they are dropped.
        """
        if self._finalizer is not None:
            self._finalizer()
        self._buffer = None

    def __enter__(self) -> PinnedSlab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _map(nbytes: int) -> mmap.mmap:
    available = available_host_bytes()
    if available is not None and nbytes > available:
        # Overcommit would grant the mapping, and the kernel would kill the process when it is filled.
        raise RuleError(
            rule=f"a slab must fit in the available host memory ({available} bytes)",
            value=nbytes,
            remedy=_REMEDY,
        )
    try:
        memory = mmap.mmap(-1, nbytes)
    except (OSError, OverflowError, ValueError) as error:
        raise RuleError(
            rule=f"host memory for the slab could not be allocated: {error}", value=nbytes, remedy=_REMEDY
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to lock and to translate; the size is unchanged
    return memory


def _register(address: int, nbytes: int) -> None:
    torch.cuda.init()
    code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
    if code != 0:
        raise RuleError(
            rule=f"host memory could not be page-locked: cudaHostRegister answered error {code}",
            value=nbytes,
            remedy=_REMEDY + " Containers may also limit locked memory (ulimit -l).",
        )


def _unregister(address: int, memory: mmap.mmap) -> None:
    del memory  # held by the finalizer until here, so the address is still mapped
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)
