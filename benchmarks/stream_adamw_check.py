"""Is it right on this device, before it is timed: bits, late lanes, syncs, growth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from operators.host_adamw import NativeUpdate, host_update
from operators.staging import CudaLanes, LaneName, Lanes, Mark, lanes_for
from operators.stream_adamw import OffloadStreamAdamW

SETTINGS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
SHAPES = [(1003,), (64, 11), (5,), (700,)]  # 2,496 elements on the flat line: seven buckets of 384


class LateLanes(CudaLanes):
    """Lanes of which one sleeps before each piece of its work."""

    def __init__(self, device: torch.device, late: LaneName) -> None:
        super().__init__(device)
        self._late = late

    def submit(
        self,
        lane: LaneName,
        work: Callable[[], object],
        after: Sequence[Mark] = (),
        done: Mark | None = None,
    ) -> None:
        if lane == self._late:
            with torch.cuda.stream(self._stream(lane)):
                torch.cuda._sleep(10_000_000)  # about 5 ms
        super().submit(lane, work, after, done)


def _train(
    device: torch.device,
    dtype: torch.dtype,
    steps: int,
    make_lanes: Callable[[torch.device], Lanes] = lanes_for,
    **kwargs: Any,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Ours and torch's fused AdamW on fp32 masters, stepped back to back: weights and masters of both."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, device=device).to(dtype)) for s in SHAPES]
    twins = [torch.nn.Parameter(p.detach().float().clone()) for p in params]
    ours = OffloadStreamAdamW(
        params, **SETTINGS, bucket_params=384, host_bucket_params=384, make_lanes=make_lanes, **kwargs
    )
    torchs = torch.optim.AdamW(twins, fused=True, **SETTINGS)
    for _ in range(steps):
        for p, twin in zip(params, twins, strict=True):
            p.grad = torch.randn(p.shape, device=device).to(dtype)
            twin.grad = p.grad.float()
        ours.step()
        torchs.step()
    state = ours.state_dict()["state"]
    got = [p.detach() for p in params] + [state[i]["master"] for i in range(len(params))]
    want = [t.detach().to(dtype) for t in twins] + [t.detach().cpu() for t in twins]
    return got, want


def _same(pair: tuple[list[torch.Tensor], list[torch.Tensor]]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(*pair, strict=True))


def _worst(pair: tuple[list[torch.Tensor], list[torch.Tensor]]) -> float:
    """Largest difference of the masters, relative to the largest of each."""
    half = len(pair[0]) // 2
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max())
        for a, b in zip(pair[0][half:], pair[1][half:], strict=True)
    )


def self_check(device: torch.device) -> tuple[bool, list[str]]:
    """Whether everything holds, and a line for each thing looked at."""
    found: list[tuple[str, bool]] = []
    for dtype in (torch.float32, torch.bfloat16):
        for engine in ("stream", "device"):
            name = (
                f"{engine}, {str(dtype).removeprefix('torch.')}: bits of torch's fused AdamW on {device.type}"
            )
            found.append((name, _same(_train(device, dtype, 5, engine=engine, staging_slots=3))))
    if device.type == "cuda":
        lates: tuple[LaneName, ...] = ("in", "out", "compute")
        for late in lates:

            def lanes(at: torch.device, late: LaneName = late) -> Lanes:
                return LateLanes(at, late)

            for engine in ("stream", "host"):
                exact: dict[str, Any] = {"engine": engine, "staging_slots": 2}
                pair = _train(device, torch.bfloat16, 3, lanes, **exact)
                on_time = _train(device, torch.bfloat16, 3, **exact)
                same = _same((pair[0], on_time[0]))
                found.append((f"{engine}: lane '{late}' late, 2 slots, same bits", same))
        found.append(("no device sync in a step", _syncs_none(device)))
        found.append(("no growth of reserved memory over 50 steps", _grows_none(device)))
    lines = [f"{'ok ' if ok else 'NOT'} {name}" for name, ok in found]
    split: dict[str, Any] = {"engine": "split", "host_share": 0.4, "staging_slots": 2}
    worst = max(
        _worst(_train(device, torch.float32, 20, engine="host")),
        _worst(_train(device, torch.float32, 20, **split)),
    )
    lines.append(
        f"{'ok ' if worst < 1e-6 else 'NOT'} host against {device.type}, 20 steps: {worst:.1e} relative"
    )
    native = host_update("auto")
    kind = "compiled" if isinstance(native, NativeUpdate) else "plain (no compiler works here)"
    lines.append(
        f"    host kernel: {kind}; on the CPU it differs from torch's fused AdamW by {_host_gap():.1e}"
    )
    return all(ok for _, ok in found) and worst < 1e-6, lines


def _host_gap() -> float:
    cpu = torch.device("cpu")
    return _worst(_train(cpu, torch.float32, 20, engine="host"))


def _syncs_none(device: torch.device) -> bool:
    params = [torch.nn.Parameter(torch.randn(s, device=device).bfloat16()) for s in SHAPES]
    optimizer = OffloadStreamAdamW(params, **SETTINGS, bucket_params=384, staging_slots=2, max_grad_norm=1.0)
    for number in range(3):
        for p in params:
            p.grad = torch.randn_like(p)
        if number == 2:
            params[0].grad = None
        torch.cuda.synchronize(device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        except RuntimeError:
            return False
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # The debug mode sees torch's own synchronising calls; a step that returns while its stream still sleeps
    # shows the rest.
    event = torch.cuda.Event()
    torch.cuda._sleep(400_000_000)
    optimizer.step()
    event.record()
    return not event.query()


def _grows_none(device: torch.device) -> bool:
    params = [torch.nn.Parameter(torch.randn(1 << 20, device=device).bfloat16()) for _ in range(4)]
    optimizer = OffloadStreamAdamW(params, bucket_params=1 << 18, max_grad_norm=1.0)
    reserved = []
    for number in range(50):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
        optimizer.zero_grad()
        if number in (4, 49):
            torch.cuda.synchronize(device)
            reserved.append(torch.cuda.memory_reserved(device))
    return reserved[0] == reserved[1]
