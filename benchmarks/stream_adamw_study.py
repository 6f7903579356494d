"""What ``split`` depends on: shares, CPU threads, buckets of the host pass, and the memory both share.

Everything runs on one slab in one process, so that figures can be compared: the link, host memory alone and with
the stream beside it, each engine alone, then both at once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.stream_adamw_bench import Bench, Result, Row
from benchmarks.stream_adamw_peers import synchronize
from operators.host_adamw import NativeUpdate
from operators.pinned_slab import PinnedSlab
from operators.staging import lanes_for
from operators.stream_adamw import OffloadStreamAdamW

_BETA, _SLOTS = 5, 3
_SHARES = (0.2, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65)
_BUCKETS = (5, 10, 25, 50)
_BUCKET = 25
_SHAPES = ((5, 2, 25), (5, 6, 25), (2.5, 6, 25), (2.5, 3, 25), (5, 3, 12), (5, 6, 12), (5, 3, 40))
"""beta, s and buckets of the host pass, in millions, tried at the best share."""
_MEMORY_GIB = 2


def split_study(bench: Bench) -> Result:
    """All of it, about 100 s for 1.6e9 parameters; a line a configuration is printed as it is measured."""
    for line in machine():
        bench.note(line)
    cores, study = torch.get_num_threads(), _Study(bench)
    copy_bytes = (16 if bench.cuda else 1) << 20
    link = bench.link("both", copy_bytes)
    bench.note(f"link, both ways: {copy_bytes / link.median / 1e9:.1f} GB/s each way")
    scratch = _Scratch(bench)
    for threads in fewer(cores, (0, cores // 2)):
        scratch.alone(threads)
    stream = study.build(engine="stream")
    study.time(stream, "stream")
    scratch.beside(stream, study.seconds["stream"], cores)
    scratch.close()
    del stream

    host = study.build(engine="host", host_bucket_params=_BUCKET * bench.unit)
    for threads in fewer(cores, (8, 2, 1, 0)):
        study.time(host, "host", threads)
    del host
    for bucket in _BUCKETS:
        if bucket != _BUCKET:
            host = study.build(engine="host", host_bucket_params=bucket * bench.unit)
            study.time(host, "host", study.best("host")["host_threads"])
            del host
    for share in _SHARES:
        split = study.build(engine="split", host_share=share, host_bucket_params=_BUCKET * bench.unit)
        for threads in fewer(cores, (4, 2, 1)):
            study.time(split, "split", threads)
        del split
    best = study.best("split")
    good: dict[str, Any] = {"engine": "split", "host_share": best["host_share"]}
    for beta, slots, bucket in _SHAPES:
        split = study.build(
            **good,
            bucket_params=int(beta * bench.unit),
            staging_slots=slots,
            host_bucket_params=bucket * bench.unit,
        )
        study.time(split, "split", best["host_threads"])
        del split
    split = study.build(**good, host_bucket_params=_BUCKET * bench.unit)
    assert split._stream is not None
    split._stream.throttled = False
    study.apart(split, {"throttled": False}, best["host_threads"])
    split._stream.throttled = True
    if split._host is not None and isinstance(split._host._update, NativeUpdate):
        split._host._update.past_caches = False
        study.apart(split, {"past_caches": False}, best["host_threads"])
    if split._host is not None:  # streams of its own for the host pass
        split._host._lanes = lanes_for(bench.device)
        study.apart(split, {"lanes": "apart"}, best["host_threads"])
    del split
    # torch's own kernel with its conversions, as a yardstick: it moves more of what both share
    split = study.build(
        engine="split",
        host_share=0.35,
        host_bucket_params=_BUCKET * bench.unit,
        host_kernel="plain",
    )
    study.apart(split, {"host_kernel": "plain"})
    del split
    alone = min(study.seconds[engine] for engine in ("stream", "host"))
    bench.note(
        f"split {study.best('split')}: {alone / study.seconds['split']:.3f}x of the better alone "
        f"({study.seconds['split'] * 1e3:.1f} against {alone * 1e3:.1f} ms)"
    )
    return bench.result


class _Study:
    """Engines on the bench's slab, timed one by one; the fastest of each engine is remembered."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.seconds: dict[str, float] = {}
        self._best: dict[str, dict[str, Any]] = {}

    def build(self, **config: Any) -> OffloadStreamAdamW:
        bench = self._bench
        return OffloadStreamAdamW(
            bench.params,
            lr=1e-4,
            host_memory=bench.slab.buffer,
            **{"bucket_params": _BETA * bench.unit, "staging_slots": _SLOTS, **config},
        )

    def best(self, engine: str) -> dict[str, Any]:
        return self._best[engine]

    def time(self, optimizer: OffloadStreamAdamW, engine: str, threads: int | None = None) -> None:
        row = self._row(optimizer, engine, threads, {})
        if row.median < self.seconds.get(engine, float("inf")):
            self.seconds[engine], self._best[engine] = row.median, row.config

    def apart(self, optimizer: OffloadStreamAdamW, more: dict[str, Any], threads: int | None = None) -> None:
        """A row of ``split`` for comparison, never the best; ``more`` says what is different."""
        self._row(optimizer, "split", threads, more)

    def _row(
        self, optimizer: OffloadStreamAdamW, engine: str, threads: int | None, more: dict[str, Any]
    ) -> Row:
        optimizer.host_threads = threads
        config: dict[str, Any] = {
            "engine": engine,
            "bucket_params": optimizer.bucket_params,
            "staging_slots": optimizer.staging_slots,
        }
        if engine != "stream":
            config |= {"host_bucket_params": optimizer.host_bucket_params, "host_threads": threads}
        if engine == "split":
            config["host_share"] = optimizer.host_share
        config |= more
        seconds = self._bench.time(optimizer.step, warm_up=1)
        row = Row("flatpeak", config, seconds, allocated_bytes=optimizer.staging_bytes)
        self._bench.result.rows.append(row)
        self._bench.note(f"{config}: {row.median * 1e3:.1f} ms")
        return row


class _Scratch:
    """Memory that the CPU scales in place: 4 bytes read and 4 written an element, nothing else."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._slab = PinnedSlab((_MEMORY_GIB << 30) if bench.cuda else 1 << 20, pin=False)
        self._memory: Tensor = self._slab.buffer.view(torch.float32).fill_(1.0)

    def close(self) -> None:
        del self._memory
        self._slab.close()

    def alone(self, threads: int) -> None:
        with _Threads(threads):
            seconds = self._bench.time(self._scale)
        self._report(seconds, {"threads": threads})

    def beside(self, stream: OffloadStreamAdamW, alone: float, threads: int) -> None:
        """Both at once: passes of the CPU while several steps of the stream are queued."""
        steps, seconds = 3, []
        synchronize(self._bench.device)
        if not self._bench.cuda:  # steps are done when they return: nothing can run beside them
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(steps):
            stream.step()
        stream_done = stream._lanes.mark()
        stream._lanes.submit("out", lambda: None, done=stream_done)
        end.record()
        with _Threads(threads):
            while not stream_done.query():
                seconds += _seconds(self._scale)
        synchronize(self._bench.device)
        # the first and last may stick out of the stream's time, where there are enough to leave them out
        self._report(seconds[1:-1] or seconds, {"threads": threads, "beside": "stream"})
        took = begin.elapsed_time(end) / 1e3 / steps
        row = Row(
            "flatpeak",
            {"engine": "stream", "bucket_params": stream.bucket_params, "staging_slots": _SLOTS}
            | {"beside": "memory"},
            [took],
            allocated_bytes=stream.staging_bytes,
        )
        self._bench.result.rows.append(row)
        n = self._bench.result.params
        self._bench.note(
            f"stream beside it: {took * 1e3:.1f} ms ({24 * n / took / 1e9:.1f} GB/s of host memory), "
            f"alone {alone * 1e3:.1f} ms"
        )

    def _scale(self) -> None:
        self._memory.mul_(1.0)

    def _report(self, seconds: list[float], config: dict[str, Any]) -> None:
        row = Row("memory", config | {"bytes": 2 * self._memory.nbytes}, seconds, pass_="scale")
        self._bench.result.rows.append(row)
        rate = 2 * self._memory.nbytes / statistics.median(seconds) / 1e9
        self._bench.note(f"host memory, read and written {config}: {rate:.1f} GB/s")


class _Threads:
    """torch's CPU threads, for a while."""

    def __init__(self, threads: int) -> None:
        self._threads, self._before = max(1, threads), torch.get_num_threads()

    def __enter__(self) -> None:
        torch.set_num_threads(self._threads)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._before)


def _seconds(work: Callable[[], None]) -> list[float]:

    start = time.perf_counter()
    work()
    return [time.perf_counter() - start]


def fewer(cores: int, less: Iterable[int]) -> list[int]:
    """Thread counts: all cores less some, each once, at least one."""
    return sorted({max(1, cores - some) for some in less})


def machine() -> list[str]:
    """The CPU, its threads and nodes, and whether large pages are given."""
    lines = []
    for path, keys in (
        ("/proc/cpuinfo", ("model name", "siblings", "cpu cores", "cache size")),
        ("/proc/meminfo", ("AnonHugePages", "MemTotal")),
    ):
        try:
            rows = Path(path).read_text().splitlines()
        except OSError:
            continue
        for key in keys:
            found = next((row for row in rows if row.startswith(key)), None)
            if found is not None:
                lines.append(" ".join(found.split()))
    for name in ("/sys/kernel/mm/transparent_hugepage/enabled", "/sys/devices/system/node/online"):
        try:
            lines.append(f"{Path(name).name}: {Path(name).read_text().strip()}")
        except OSError:
            continue
    return lines
