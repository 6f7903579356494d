"""What OffloadStreamAdamW is measured against: the host link itself, and CPU AdamW with its transfers."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Direction = Literal["in", "out", "both"]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def link_seconds(
    memory: Tensor, device: torch.device, direction: Direction, copy_bytes: int, seconds: float
) -> float:
    """Seconds a copy of ``copy_bytes`` takes, each way, over about ``seconds`` of back-to-back copies.

    Args:
        memory: page-locked uint8 host memory. Copies walk through it, so that no cache holds what they move.
    """
    cuda = device.type == "cuda"
    inward = torch.empty(copy_bytes, dtype=torch.uint8, device=device)
    outward = torch.empty(copy_bytes, dtype=torch.uint8, device=device)
    lanes = [torch.cuda.Stream(device) for _ in range(2)] if cuda else []
    pieces = memory.numel() // copy_bytes
    at = 0

    def copies(count: int) -> float:
        nonlocal at
        synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            # the two directions never touch the same piece at the same time
            source = memory[(at % pieces) * copy_bytes :][:copy_bytes]
            target = memory[((at + pieces // 2) % pieces) * copy_bytes :][:copy_bytes]
            at += 1
            for lane, (name, to, piece) in enumerate((("in", inward, source), ("out", target, outward))):
                if direction not in (name, "both"):
                    continue
                if cuda:
                    with torch.cuda.stream(lanes[lane]):
                        to.copy_(piece, non_blocking=True)
                else:
                    to.copy_(piece)
        synchronize(device)
        return time.perf_counter() - start

    count = 4
    warm = copies(count)
    count = max(4, min(2000, int(count * seconds / max(warm, 1e-6))))
    return copies(count) / count


class SerialCpuAdamW:
    """torch's fused CPU AdamW, one transfer down and one up: gradients, update, weights, nothing overlapped."""

    def __init__(self, params: Sequence[Tensor], memory: Tensor, update: Callable[..., Any] | None) -> None:
        self._params = params
        self._cuda = params[0].is_cuda
        self._at = 0
        self._memory = memory
        sizes = [p.numel() for p in params]
        self._grads = [self._take(n, p.dtype) for n, p in zip(sizes, params, strict=True)]
        self._weights = [self._take(n, p.dtype) for n, p in zip(sizes, params, strict=True)]
        self._masters = [torch.nn.Parameter(self._take(n, torch.float32)) for n in sizes]
        for master, p in zip(self._masters, params, strict=True):
            master.data.copy_(p.detach().view(-1))
            master.grad = self._take(master.numel(), torch.float32)
        self._optimizer = (update or _torch_adamw)(self._masters)

    @staticmethod
    def bytes_needed(params: Sequence[Tensor]) -> int:
        return sum(p.numel() * (2 * p.element_size() + 8) + 4 * 256 for p in params)

    def _take(self, n: int, dtype: torch.dtype) -> Tensor:
        start = -(-self._at // 256) * 256
        self._at = start + n * dtype.itemsize
        return self._memory[start : self._at].view(dtype)

    @torch.no_grad()
    def step(self) -> None:
        for to, p in zip(self._grads, self._params, strict=True):
            assert p.grad is not None
            to.copy_(p.grad.view(-1), non_blocking=True)
        synchronize(self._params[0].device)
        for master, grad in zip(self._masters, self._grads, strict=True):
            assert master.grad is not None
            master.grad.copy_(grad)
        self._optimizer.step()
        for weight, master, p in zip(self._weights, self._masters, self._params, strict=True):
            weight.copy_(master)
            p.view(-1).copy_(weight, non_blocking=True)


def _torch_adamw(masters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(masters, fused=True)


def deepspeed_adamw() -> Callable[..., Any] | str:
    """DeepSpeed's CPUAdam as a maker of optimizers, or why there is none here."""
    try:
        maker = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        maker([torch.nn.Parameter(torch.zeros(8))])  # builds its extension now, or fails now
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return lambda masters: maker(masters, adamw_mode=True)
