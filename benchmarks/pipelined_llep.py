"""Compare the ways to dispatch one MoE layer: time and peak, on one GPU with loopback peers, or tiny on a CPU.

    python -m benchmarks.pipelined_llep --out pipelined_llep.csv
    python -m benchmarks.pipelined_llep --curves --out curves.csv
    python -m benchmarks.pipelined_llep --tiny --out tiny.csv

Checks the kernels first, then runs every variant; one that fails is reported and the rest go on. Rows go to
``--out``; a table is printed last. With loopback peers compute and memory are true and link time is absent.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm
from torch.utils.checkpoint import checkpoint

from benchmarks.pipelined_llep_checks import kernel_checks
from benchmarks.pipelined_llep_curves import Shape, Variant, curves, floor_by_rows, policy_chunks
from benchmarks.rows import COLUMNS, commit, hardware_id
from operators.dispatch_launch import DispatchLaunch
from operators.dry_run import PeakTracker
from operators.expert_baselines import llep, standard_ep
from operators.expert_mlp import ExpertWeights
from operators.pipelined_llep import OPERATOR_VERSION, pipelined_llep
from operators.ranks import LoopbackRanks
from operators.routing import Routing

POLICY_FLOPS = 680e12  # bf16 expert matmuls of one H200, as measured; only the chunk policies read it
SLOW_MODE = 1.06  # above this multiple of the fastest repeat a run counts as the slow mode


@dataclass
class Result:
    variant: Variant
    forward: list[float]
    both: list[float]
    peak: int
    reserved: int
    source: str


class Bench:
    """Inputs of one shape, kept between the variants that share it."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._shape: Shape | None = None
        self._routing: tuple[Shape, int, Routing] | None = None
        self.x: Tensor
        self.grad: Tensor
        self.scores: Tensor
        self.own: ExpertWeights

    def prepare(self, shape: Shape) -> None:
        key = replace(shape, profile="")
        if self._shape == key:
            return
        self._shape = key
        for old in ("x", "scores", "grad", "own"):
            self.__dict__.pop(old, None)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        g = torch.Generator(self.device).manual_seed(0)

        def normal(*size: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*size, generator=g, device=self.device, dtype=self.dtype).mul_(scale)

        local = shape.experts // shape.ranks
        self.x = normal(shape.tokens, shape.hidden).requires_grad_()
        self.grad = normal(shape.tokens, shape.hidden)
        self.scores = torch.rand(
            shape.tokens, shape.experts, generator=g, device=self.device, dtype=torch.float32
        ).requires_grad_()
        self.own = ExpertWeights(
            normal(local, 2 * shape.intermediate, shape.hidden, scale=shape.hidden**-0.5).requires_grad_(),
            normal(local, shape.hidden, shape.intermediate, scale=shape.intermediate**-0.5).requires_grad_(),
        )

    def layer(self, variant: Variant) -> Callable[[], Tensor]:
        """One forward, planning included (it is part of the layer's time)."""
        shape = variant.shape
        ranks = LoopbackRanks(shape.ranks, variant.rank)
        routing = self._route(shape, variant.rank)
        launch = DispatchLaunch.for_chunks(
            variant.chunks,
            shape.tokens,
            dispatch_schedule=variant.schedule,  # type: ignore[arg-type]
            backward="nested" if variant.provider == "nested" else "chunked",
        )
        x, scores, own = self.x, self.scores, self.own
        if variant.provider in {"flatpeak", "nested"}:
            return lambda: pipelined_llep(x, scores, routing, own, ranks=ranks, launch=launch)
        if variant.provider == "plain":
            return lambda: plain(x, scores, routing, own)
        run = standard_ep if variant.provider == "standard_ep" else llep
        again = variant.provider.endswith("recompute")
        return lambda: run(x, scores, routing, own, ranks=ranks, launch=launch, recompute=again)

    def _route(self, shape: Shape, rank: int) -> Routing:
        """Kept for the next variant: random routers are drawn on the host."""
        if self._routing is None or self._routing[:2] != (shape, rank):
            self._routing = (shape, rank, shape.routing(rank, self.device))
        return self._routing[2]

    def clear(self) -> None:
        for t in (self.x, self.scores, *self.own):
            if t is not None:
                t.grad = None

    def measure(self, variant: Variant) -> Result:
        self.prepare(variant.shape)
        layer = self.layer(variant)
        cuda = self.device.type == "cuda"
        forward, both = [], []
        peak = reserved = 0
        if cuda:
            torch.cuda.empty_cache()
        for repeat in range(variant.repeats + 2):
            self.clear()
            if repeat < 2 and cuda:  # the peak comes from the second, untimed run: nothing compiles any more
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            if not cuda and repeat == 1:
                with PeakTracker() as tracker:
                    tracker.adopt(self.x, self.grad, self.scores, self.own)
                    layer().backward(self.grad)
                peak = tracker.peak_bytes
                continue
            seconds = self._timed(layer)
            if repeat == 1:
                peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            if repeat >= 2:
                forward.append(seconds[0])
                both.append(seconds[1])
        self.clear()
        return Result(variant, forward, both, peak, reserved, "cuda" if cuda else "tracked")

    def _timed(self, layer: Callable[[], Tensor]) -> tuple[float, float]:
        if self.device.type != "cuda":
            start = time.perf_counter()
            y = layer()
            middle = time.perf_counter()
            y.backward(self.grad)
            return middle - start, time.perf_counter() - start
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        torch.cuda.synchronize()
        events[0].record()
        y = layer()
        events[1].record()
        y.backward(self.grad)
        events[2].record()
        torch.cuda.synchronize()
        return events[0].elapsed_time(events[1]) / 1e3, events[0].elapsed_time(events[2]) / 1e3


def plain(x: Tensor, scores: Tensor, routing: Routing, own: ExpertWeights) -> Tensor:
    """All at once by ordinary autograd inside a layer checkpoint: what a first implementation looks like.

    Rows received are copies of the rows sent, spread evenly over the local experts (a balanced router).
    """
    out: Tensor = checkpoint(
        _plain, x, scores, routing.ids_NK, own.gate_up_EGH, own.down_EHI, use_reentrant=False
    )
    return out


def _plain(x: Tensor, scores: Tensor, ids: Tensor, up: Tensor, down: Tensor) -> Tensor:
    order = torch.sort(ids.flatten(), stable=True).indices
    tokens = order // ids.shape[1]
    received = x[tokens].clone()
    local, rows = up.shape[0], order.shape[0]
    ends = [(i + 1) * rows // local for i in range(local)]
    offs = torch.tensor(ends, dtype=torch.int32).to(x.device)
    values = _grouped(received, up, offs, ends)
    gate, value = values.chunk(2, dim=1)
    y = _grouped(torch.nn.functional.silu(gate) * value, down, offs, ends)
    returned = y.clone()
    weights = scores.gather(1, ids).flatten()[order].to(x.dtype)
    return torch.zeros_like(x).index_add(0, tokens, returned * weights[:, None])


def _grouped(rows: Tensor, weight: Tensor, offs: Tensor, ends: list[int]) -> Tensor:
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        return grouped_mm(rows, weight.transpose(1, 2), offs=offs)
    starts = [0, *ends[:-1]]
    return torch.cat([rows[a:b] @ w.t() for a, b, w in zip(starts, ends, weight, strict=True)])


def gemm_floor(bench: Bench, shape: Shape, chunks: int) -> dict[str, float]:
    """Seconds of the eleven expert matmuls alone, per layer, at a chunk's row counts: grouped and dense."""
    local = shape.experts // shape.ranks
    rows = shape.tokens * shape.top_k // chunks
    g, dtype, dev = shape.intermediate * 2, bench.dtype, bench.device
    up = torch.randn(local, g, shape.hidden, device=dev, dtype=dtype)
    down = torch.randn(local, shape.hidden, shape.intermediate, device=dev, dtype=dtype)
    x = torch.randn(rows, shape.hidden, device=dev, dtype=dtype)
    h = torch.randn(rows, shape.intermediate, device=dev, dtype=dtype)
    d = torch.randn(rows, g, device=dev, dtype=dtype)
    ends = torch.tensor([(i + 1) * rows // local for i in range(local)], dtype=torch.int32, device=dev)
    step = rows // local

    def grouped() -> None:
        for _ in range(2):
            grouped_mm(x, up.transpose(1, 2), offs=ends)
        grouped_mm(h, down.transpose(1, 2), offs=ends)
        grouped_mm(x, down, offs=ends)
        grouped_mm(d, up, offs=ends)
        grouped_mm(x.t(), h, offs=ends)
        grouped_mm(d.t(), x, offs=ends)

    def dense() -> None:
        for i in range(local):
            s = slice(i * step, (i + 1) * step)
            for _ in range(2):
                torch.mm(x[s], up[i].t())
            torch.mm(h[s], down[i].t())
            torch.mm(x[s], down[i])
            torch.mm(d[s], up[i])
            torch.mm(x[s].t(), h[s])
            torch.mm(d[s].t(), x[s])

    return {"grouped": _time(grouped) * chunks, "dense": _time(dense) * chunks}


def _time(work: Callable[[], None]) -> float:
    times = []
    for _ in range(4):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        work()
        events[1].record()
        torch.cuda.synchronize()
        times.append(float(events[0].elapsed_time(events[1])) / 1e3)
    return statistics.median(times[1:])


def variants(shape: Shape) -> list[Variant]:
    """Everything to compare at a shape."""

    def at(provider: str, chunks: int = 1, schedule: str = "serial") -> Variant:
        return Variant(provider, chunks, schedule, shape=shape)

    skewed, small = replace(shape, profile="skew:80/16"), replace(shape, tokens=128)
    long = replace(shape, tokens=shape.tokens * 2)
    one_hot = replace(shape, profile="one_hot")
    return [
        at("plain"),
        at("llep_recompute"),
        at("llep"),
        at("standard_ep"),
        *[at("flatpeak", k, s) for s in ("serial", "prefetch", "overlap") for k in (8, 16)],
        *[at("flatpeak", k) for k in (1, 4, 32)],
        at("nested", 8),
        *[Variant("flatpeak", 8, rank=r, shape=skewed, repeats=3) for r in range(shape.ranks)],
        Variant("flatpeak", 16, rank=0, shape=one_hot, repeats=3),
        *[Variant(p, 1, shape=small, repeats=20) for p in ("llep_recompute", "flatpeak", "plain")],
        Variant("flatpeak", 10, shape=long, repeats=3),
        Variant("llep_recompute", 1, shape=long, repeats=3),
    ]


def rows_of(result: Result, hardware: str, revision: str) -> list[dict[str, Any]]:
    v = result.variant
    shared = {
        "operator": "pipelined_llep",
        "provider": v.provider,
        "config_json": json.dumps({"chunks": v.chunks, "dispatch_schedule": v.schedule}),
        "shape_json": json.dumps(asdict(v.shape)),
        "rank": v.rank,
        "allocated_bytes": result.peak,
        "reserved_bytes": result.reserved,
        "peak_source": result.source,
        "hardware_id": hardware,
        "operator_version": OPERATOR_VERSION,
        "commit": revision,
    }
    return [
        {**shared, "pass": name, "repeat": i, "seconds": f"{s:.6f}"}
        for name, times in (("forward", result.forward), ("forward_backward", result.both))
        for i, s in enumerate(times)
    ]


def line(result: Result) -> str:
    times = sorted(result.both)
    fast = [t for t in times if t <= times[0] * SLOW_MODE]
    slow = times[len(fast) :]
    modes = f" slow mode {1e3 * statistics.median(slow):.1f} ({len(slow)}/{len(times)})" if slow else ""
    return (
        f"{result.variant.label} {1e3 * statistics.median(result.forward):8.2f} "
        f"{1e3 * statistics.median(times):8.2f} ms  {result.peak / 2**30:7.3f} GiB{modes}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in asdict(Shape()).items():
        parser.add_argument(f"--{name}", type=type(default), default=None)
    parser.add_argument("--tiny", action="store_true", help="a shape for a CPU")
    parser.add_argument(
        "--curves", action="store_true", help="latency and peak against K, by tokens and router"
    )
    parser.add_argument("--link-gb-s", type=float, default=50.0, help="a rank's link, for the chunk policies")
    parser.add_argument("--alpha-us", type=float, default=100.0, help="start-up of a chunk, for the policies")
    parser.add_argument("--commit", default=None, help="what to write into the rows where git is not at hand")
    parser.add_argument("--only", default="", help="run variants whose label contains this")
    parser.add_argument("--out", type=Path, default=Path("pipelined_llep.csv"))
    args = parser.parse_args()
    given = {k: getattr(args, k) for k in asdict(Shape()) if getattr(args, k) is not None}
    shape = Shape(256, 64, 32, 32, 4, 4) if args.tiny else Shape()
    shape = replace(shape, **given)
    cuda = torch.cuda.is_available() and not args.tiny
    device = torch.device("cuda" if cuda else "cpu")
    bench = Bench(device, torch.bfloat16 if cuda else torch.float32)
    lines = [f"check  {text}" for text in kernel_checks(device)]
    results = []
    revision = args.commit or commit()
    policies = policy_chunks(
        shape, link_bytes_s=args.link_gb_s * 1e9, alpha_s=args.alpha_us / 1e6, flops=POLICY_FLOPS
    )
    lines += [f"policy {name}: K={k}" for name, k in policies.items()]
    wanted = curves(shape, device, policies.values()) if args.curves else variants(shape)
    chosen = [v for v in wanted if args.only in v.label]
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for variant in chosen:
            try:
                result = bench.measure(variant)
            except Exception as error:  # one variant that fails must not cost the others
                lines.append(f"{variant.label} failed: {type(error).__name__}: {str(error)[:200]}")
                continue
            results.append(result)
            writer.writerows(rows_of(result, hardware_id(), revision))
            file.flush()
            print(line(result), flush=True)
    if cuda and args.curves:
        bench.prepare(replace(shape, tokens=128))
        lines += floor_by_rows(shape, _time, device)
    elif cuda:
        bench.prepare(replace(shape, tokens=128))
        for chunks in (1, 8, 16):
            floor = gemm_floor(bench, shape, chunks)
            lines.append(
                f"floor  11 matmuls at K={chunks}: "
                + ", ".join(f"{k} {1e3 * s:.1f} ms" for k, s in floor.items())
            )
    print("\n".join(["", *[line(r) for r in results], *lines]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
