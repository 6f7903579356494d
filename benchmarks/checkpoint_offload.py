"""SCO on one device: peak, locked bytes and step time at five host budgets, against keeping every boundary.

    python -m benchmarks.checkpoint_offload --out rows.csv          # one H200, about two minutes
    python -m benchmarks.checkpoint_offload --tiny                  # a laptop, seconds

What limits it: the peak can fall only as far as the phases say (measured per segment in the run that keeps all,
then ``offload_gain``); the step can lose nothing as long as a boundary's copy is shorter than its segment.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

# before CUDA starts: without it deterministic matmuls are refused
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import Tensor

from benchmarks.checkpoint_offload_stack import GPT_OSS_20B, TINY, Meter, Shape, Stack
from benchmarks.rows import COLUMNS, commit, hardware_id
from operators.bounds.checkpoint_offload import boundary_bytes, locked_bytes, offloaded_count
from operators.checkpoint_offload import OPERATOR_VERSION, OffloadReport, OffloadSession
from operators.checkpoint_offload_gain import offload_gain
from operators.dry_run import PeakTracker

_GIB = 2**30
_SHARES = (0, 25, 50, 75, 100)


@dataclass
class Run:
    """One budget (None: no session at all)."""

    share: int | None
    meter: Meter
    report: OffloadReport | None = None
    seconds: list[float] = field(default_factory=list)
    reserved_bytes: int = 0
    same: bool = True

    @property
    def budget_name(self) -> str:
        return "keep" if self.share is None else f"{self.share} %"


class Bench:
    """The stack, its input, and the gradients that every run has to reproduce."""

    def __init__(self, shape: Shape, repeats: int) -> None:
        self.shape, self.repeats = shape, repeats
        self.cuda = shape.device.type == "cuda"
        torch.manual_seed(0)
        self.tracker = None if self.cuda else PeakTracker()
        self.stack = Stack(shape)
        self.tokens_NH = torch.randn(shape.tokens, shape.hidden, dtype=shape.dtype, device=shape.device)
        # made before anything is measured: every run has the same memory beside it
        self.reference = [torch.empty_like(p) for p in self.stack.parameters()]
        self.one = boundary_bytes(tokens=shape.tokens, hidden=shape.hidden, scalar_bytes=shape.dtype.itemsize)
        self.step(None)
        for kept, parameter in zip(self.reference, self.stack.parameters(), strict=True):
            assert parameter.grad is not None
            kept.copy_(parameter.grad)

    def step(self, session: OffloadSession | None) -> None:
        for parameter in self.stack.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()
        if session is None:
            loss = self.stack(self.tokens_NH)
        else:
            with session:
                loss = self.stack(self.tokens_NH)
        loss.backward()

    def run(self, share: int | None) -> Run:
        session = None
        if share is not None:
            budget = share * self.shape.boundaries * locked_bytes(boundary_bytes=self.one, offloaded=1) // 100
            session = OffloadSession(
                budget,
                boundary_bytes=self.one,
                boundaries=self.shape.boundaries,
                device=self.shape.device,
                min_bytes=1,
            )
        run = Run(share, self._measured_step(session))
        run.same = self._matches()
        for _ in range(self.repeats):
            self._synchronize()
            start = time.perf_counter()
            self.step(session)
            self._synchronize()
            run.seconds.append(time.perf_counter() - start)
        run.same = run.same and self._matches()
        if self.cuda:
            run.reserved_bytes = torch.cuda.max_memory_reserved()
        if session is not None:
            run.report = session.report()
            session.close()
        return run

    def _measured_step(self, session: OffloadSession | None) -> Meter:
        meter = Meter(self.shape.device, self.tracker)
        if self.cuda:
            torch.cuda.empty_cache()
        self.stack.enter = meter.enter
        try:
            if self.tracker is None:
                self.step(session)
            else:
                with self.tracker:
                    self.step(session)
            meter.leave()
        finally:
            self.stack.enter = None
        return meter

    def _matches(self) -> bool:
        grads = [p.grad for p in self.stack.parameters() if p.grad is not None]
        return all(torch.equal(a, b) for a, b in zip(self.reference, grads, strict=True))

    def _synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def race_check(device: torch.device) -> bool:
    """Three boundaries of 64 MB under copies that start late, with NaN where freed memory is used again."""
    width = 1024
    rows = (64 << 20) // (2 * width) if device.type == "cuda" else 64
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weights = [
        (torch.randn(width, width, device=device, dtype=dtype) / 32).requires_grad_() for _ in range(4)
    ]
    start = torch.randn(rows, width, device=device, dtype=dtype)

    def grads(session: OffloadSession | None) -> list[Tensor]:
        def sleep() -> None:
            lane = session.slab.lane.stream if session is not None else None
            if lane is not None:
                with torch.cuda.stream(lane):
                    torch.cuda._sleep(200_000_000)  # about 0.1 s

        def forward() -> Tensor:
            x = start * weights[0][0]
            for weight in weights:
                sleep()
                base = torch.cat([x.new_full((3, width), torch.nan), x])
                x = torch.utils.checkpoint.checkpoint(_block, base[3:], weight, use_reentrant=False)
                del base
                torch.full((rows + 3, width), torch.nan, device=device, dtype=dtype)
            return x.float().square().mean()

        if session is None:
            loss = forward()
        else:
            with session:
                loss = forward()
        sleep()
        return list(torch.autograd.grad(loss, weights))

    want = grads(None)
    size = rows * width * dtype.itemsize
    with_session = OffloadSession(3 * size, boundary_bytes=size, boundaries=4, device=device, min_bytes=1)
    got = [grads(with_session) for _ in range(2)]
    reloads = with_session.report().reloads
    with_session.close()
    return reloads == 6 and all(torch.equal(a, b) for one in got for a, b in zip(want, one, strict=True))


def _block(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x @ weight)


def table(bench: Bench, runs: list[Run]) -> list[str]:
    """One line a budget: what was predicted from the run that keeps all, and what came out."""
    shape, keep = bench.shape, [run for run in runs if run.share is None]
    base = min(statistics.median(run.seconds) for run in keep)
    peak0 = keep[0].meter.peak_bytes
    lines = [
        f"boundary {bench.one / _GIB:.5f} GiB x {shape.boundaries}; copy must hide behind its segment",
        f"{'budget':>7} {'away':>4} {'locked GiB':>10} {'peak GiB':>9} {'fall':>8} {'predicted':>9} {'off by':>7} "
        f"{'live':>4} {'prefetched':>10} {'step s':>8} {'ratio':>6} {'bits':>5}",
    ]
    for run in runs:
        report, peak = run.report, run.meter.peak_bytes
        away = report.offloaded if report is not None else 0
        gain = offload_gain(
            keep[0].meter.phases, boundary_bytes=bench.one, boundaries=shape.boundaries, offloaded=away
        )
        seconds = statistics.median(run.seconds)
        fetched = f"{report.prefetched}/{report.reloads}" if report is not None else "-"
        lines.append(
            f"{run.budget_name:>7} {away:>4} {(report.locked_bytes if report else 0) / _GIB:>10.4f} "
            f"{peak / _GIB:>9.4f} {(peak0 - peak) / _GIB:>8.4f} {gain.gain_bytes / _GIB:>9.4f} "
            f"{abs(peak - gain.after_bytes) / max(bench.one, gain.gain_bytes):>7.2%} "
            f"{report.most_restored if report else 0:>4} {fetched:>10} {seconds:>8.4f} {seconds / base:>6.3f} "
            f"{'same' if run.same else 'DIFFER':>5}"
        )
    last = offload_gain(
        keep[0].meter.phases,
        boundary_bytes=bench.one,
        boundaries=shape.boundaries,
        offloaded=offloaded_count(
            boundary_bytes=bench.one, boundaries=shape.boundaries, host_budget_bytes=1 << 60
        ),
    )
    return [*lines, f"with all away: {last}"]


def rows(bench: Bench, runs: list[Run]) -> list[dict[str, object]]:
    """Samples in the project's form, one a repeat."""
    shape = bench.shape
    described = {
        "tokens": shape.tokens,
        "hidden": shape.hidden,
        "boundaries": shape.boundaries,
        "dtype": str(shape.dtype).removeprefix("torch."),
    }
    hardware, revision = hardware_id(), commit()
    found: list[dict[str, object]] = []
    for run in runs:
        config = {"host_budget_bytes": run.report.locked_bytes if run.report is not None else 0}
        for repeat, seconds in enumerate(run.seconds):
            values = (
                "checkpoint_offload",
                "keep" if run.share is None else "flatpeak",
                json.dumps(config),
                json.dumps(described),
                "forward_backward",
                0,
                repeat,
                f"{seconds:.6f}",
                run.meter.peak_bytes,
                run.reserved_bytes,
                "cuda" if bench.cuda else "tracked",
                hardware,
                OPERATOR_VERSION,
                revision,
            )
            found.append(dict(zip(COLUMNS, values, strict=True)))
    return found


@contextmanager
def _deterministic() -> Iterator[None]:
    """Kernels whose bits repeat: else two runs without any session would differ already."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    # that mode would also fill every allocation with NaN, which is work that no real step does
    settings = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory  # type: ignore[attr-defined]
    settings.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def _all_budgets(bench: Bench, seconds: float) -> list[Run]:
    """Without a session, every share, and without once more: a clock that drifts would show."""
    start = time.perf_counter()
    runs = [bench.run(None)]
    if (time.perf_counter() - start) * (len(_SHARES) + 2) > seconds:
        bench.repeats = 1
    for share in _SHARES:
        runs.append(bench.run(share))
        print(f"  {runs[-1].budget_name}: {runs[-1].report}", file=sys.stderr, flush=True)
    return [*runs, bench.run(None)]


def main(argv: list[str] | None = None) -> int:
    """Exit 1 if a result differs in a bit, or more than two blocks' boundaries were restored at once."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="append samples to this CSV")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tokens", type=int, help="tokens of the rank (a multiple of --sequence)")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--sequence", type=int, help="length of one sequence, for attention's work")
    parser.add_argument(
        "--seconds", type=float, default=140.0, help="one repeat only if more would take longer"
    )
    parser.add_argument("--tiny", action="store_true", help="a small float32 shape on the CPU")
    options = parser.parse_args(argv)

    device = torch.device("cpu" if options.tiny or not torch.cuda.is_available() else "cuda:0")
    sizes = dict(TINY if device.type == "cpu" else GPT_OSS_20B)
    sizes |= {k: v for k in ("tokens", "layers", "sequence") if (v := getattr(options, k)) is not None}
    shape = Shape(**sizes, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16, device=device)
    if shape.tokens % shape.sequence:
        parser.error(f"--tokens {shape.tokens} is no multiple of --sequence {shape.sequence}")
    with _deterministic():
        raced = race_check(device)
        print(f"late copies, freed memory overwritten: {'same bits' if raced else 'BITS DIFFER'}", flush=True)
        bench = Bench(shape, options.repeats)
        runs = _all_budgets(bench, options.seconds)
    if options.out is not None:
        new = not options.out.exists()
        with options.out.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if new:
                writer.writeheader()
            writer.writerows(rows(bench, runs))
    print("\n".join(table(bench, runs)))
    good = raced and all(run.same and (run.report is None or run.report.most_restored <= 2) for run in runs)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
