"""What the optimizer's benchmark is built from: memory that configurations borrow in turn, timing, rows."""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.rows import COLUMNS, commit, hardware_id
from benchmarks.stream_adamw_peers import Direction, SerialCpuAdamW, link_seconds, synchronize
from operators.bounds.stream_adamw import host_bytes
from operators.dry_run import PeakTracker
from operators.pinned_slab import PinnedSlab
from operators.stream_adamw import OPERATOR_VERSION, OffloadStreamAdamW

_MIB, _GIB = 2**20, 2**30


class Barrier(Protocol):
    def wait(self) -> int: ...


@dataclass
class Row:
    """One configuration: what was run, every repeat, and the device bytes above weights and gradients."""

    provider: str
    config: dict[str, Any]
    seconds: list[float]
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    pass_: str = "step"

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass
class Result:
    """What one GPU measured."""

    rank: int
    params: int
    resident_bytes: int
    hardware_id: str
    peak_source: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    good: bool = True


class Bench:
    """Weights, gradients and one piece of host memory that every configuration borrows in turn."""

    def __init__(self, options: argparse.Namespace, rank: int, barrier: Barrier | None) -> None:
        self.options, self.rank, self.barrier = options, rank, barrier
        self.cuda = not options.tiny
        self.device = torch.device("cuda", rank) if self.cuda else torch.device("cpu")
        self.unit = 1_000_000 if self.cuda else 6_400
        torch.manual_seed(0)
        n = int(options.params)
        piece = 1 << 24 if self.cuda else 1 << 15
        sizes = [piece] * (n // piece) + ([n % piece] if n % piece else [])
        self.params = [
            torch.nn.Parameter((torch.randn(s, device=self.device) * 0.02).bfloat16()) for s in sizes
        ]
        for p in self.params:
            p.grad = torch.randn(p.shape, device=self.device, dtype=torch.bfloat16)
        self.result = Result(rank, n, 4 * n, hardware_id(), "cuda" if self.cuda else "tracked")
        wanted = [
            SerialCpuAdamW.bytes_needed(self.params),
            host_bytes(params=n + 64, bucket_params=50 * self.unit, staging_slots=6, engine="host"),
        ]
        start = time.perf_counter()
        self.slab = PinnedSlab(max(wanted))
        taken = time.perf_counter() - start
        self.note(f"{torch.get_num_threads()} CPU threads")
        self.note(f"{self.slab.locked_bytes / _GIB:.1f} GiB of host memory in {taken:.1f} s")

    def note(self, text: str) -> None:
        self.result.notes.append(text)
        print(f"[{self.rank}] {text}", file=sys.stderr, flush=True)

    def link(self, direction: Direction, copy_bytes: int) -> Row:
        self._meet()
        seconds = link_seconds(
            self.slab.buffer, self.device, direction, copy_bytes, self.options.link_seconds
        )
        row = Row("link", {"direction": direction, "copy_bytes": copy_bytes}, [seconds], pass_="copy")
        self.result.rows.append(row)
        return row

    def engine(self, provider: str, **config: Any) -> Row:
        """One configuration of ours: two steps to warm up, then the repeats, each waited for to its end."""
        kernel = config.pop("host_kernel", "auto")
        tracker = PeakTracker()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        on_card = config["engine"] == "device"
        optimizer = OffloadStreamAdamW(
            self.params,
            lr=1e-4,
            **config,
            host_kernel=kernel,
            host_memory=None if on_card else self.slab.buffer,
        )
        row = Row(provider, {**config, "host_kernel": kernel}, self.time(optimizer.step))
        if self.cuda:
            row.allocated_bytes = torch.cuda.max_memory_allocated(self.device) - before
            row.reserved_bytes = torch.cuda.max_memory_reserved(self.device)
        else:
            with tracker:
                optimizer.step()
            row.allocated_bytes = optimizer.staging_bytes + tracker.peak_bytes
        self.result.rows.append(row)
        self.note(f"{provider} {row.config}: {row.median * 1e3:.1f} ms")
        return row

    def serial(self, provider: str, maker: Callable[..., Any] | None) -> Row:
        peer = SerialCpuAdamW(self.params, self.slab.buffer, maker)
        row = Row(provider, {"engine": "host", "transfers": "serial"}, self.time(peer.step))
        self.result.rows.append(row)
        self.note(f"{provider} serial: {row.median * 1e3:.1f} ms")
        return row

    def time(self, step: Callable[[], Any], warm_up: int = 2) -> list[float]:
        """Seconds of every repeat of ``step``, each waited for to its end."""
        for _ in range(warm_up):
            step()
        seconds = []
        for _ in range(self.options.repeats):
            synchronize(self.device)
            self._meet()
            start = time.perf_counter()
            step()
            synchronize(self.device)
            seconds.append(time.perf_counter() - start)
        return seconds

    def _meet(self) -> None:
        if self.barrier is not None:
            self.barrier.wait()


def write(path: Path, results: list[Result], active_gpus: int) -> None:
    """Append samples in the project's form, one a repeat."""
    revision, new = commit(), not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(COLUMNS)
        for result in results:
            shape = {"params": result.params, "dtype": "bfloat16", "resident_bytes": result.resident_bytes}
            for row in result.rows:
                config = {**row.config, "active_gpus": active_gpus}
                for repeat, seconds in enumerate(row.seconds):
                    writer.writerow(
                        [
                            "stream_adamw",
                            row.provider,
                            json.dumps(config),
                            json.dumps(shape),
                            row.pass_,
                            result.rank,
                            repeat,
                            f"{seconds:.9f}",
                            row.allocated_bytes,
                            row.reserved_bytes,
                            result.peak_source,
                            result.hardware_id,
                            OPERATOR_VERSION,
                            revision,
                        ]
                    )
