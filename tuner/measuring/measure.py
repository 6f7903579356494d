"""Measure one configuration on every rank of a gang: steady, aligned, repeated, checked, with its peaks."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

import torch

from operators.dry_run import PeakTracker
from operators.ranks import LoopbackRanks, Ranks
from tuner.measuring.environment import Watch, others_on_card
from tuner.measuring.front import SLOWEST_MODE, Point, out_of_reach
from tuner.registry import OperatorAdapter, Runnable
from tuner.space import Config

# Steady: two successive warm-ups within this ratio; a shape that never settles is measured all the same.
_STEADY = 1.10
_MIN_WARMUPS, _MAX_WARMUPS = 2, 6
_WARMUP_S = 10.0

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class MeasureRequest:
    """What is measured. ``adapter`` is the ``module:name`` that a rank loads.

    Attributes:
        front: (peak bytes, seconds) of points already measured. When it is not empty, a point that needs as much
            memory as one of them and is slower, whatever its mode, is stopped after its first repeat.
        slack: how far a first repeat may lie above the fast mode.
        loopback: the one rank plays rank 0 of a group of so many; its results are checked in a group of one.
    """

    adapter: str
    provider: str
    shape: dict[str, Any]
    config: Config
    device: str = "cpu"
    repeats: int = 3
    front: list[Point] = field(default_factory=list)
    slack: float = SLOWEST_MODE
    loopback: int | None = None

    def payload(self) -> dict[str, Any]:
        """JSON for the ranks."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class PassPeak:
    """Highest memory of one pass, in bytes. ``reserved`` exists only where there is an allocator to ask."""

    allocated: int
    reserved: int | None


def measure_rank(ranks: Ranks, payload: dict[str, Any], report: Report) -> dict[str, Any]:
    """Run by every rank. A card that ran out of memory while others held some of it says so.

    Returns:
        ``samples``: rows ``[pass, repeat, seconds, allocated_bytes, reserved_bytes]``; ``peak_source``;
        ``base_bytes`` (inputs and weights), ``library_bytes`` (the matmul library's part of the peak),
        ``host_locked_bytes``, ``device_used_bytes``, ``warmups``,
        ``error`` and ``tolerance`` of the check against the reference; ``pruned``, the (peak, seconds) of the
        point that put this one out of reach, or None; ``watch``, what surrounded it (:meth:`Watch.answer`).
    """
    try:
        return _measure(ranks, payload, report)
    except torch.OutOfMemoryError as error:
        if (others := others_on_card()) is None:
            raise
        first = str(error).strip().splitlines()[0]
        raise torch.OutOfMemoryError(f"{others}, held some of the card: {first}") from error


def _measure(ranks: Ranks, payload: dict[str, Any], report: Report) -> dict[str, Any]:
    from tuner.executors.rank_process import load

    request = MeasureRequest(**payload)
    adapter: OperatorAdapter = load(request.adapter)
    cuda = request.device == "cuda"
    watch = Watch(request.device)
    whole: Ranks = ranks
    if request.loopback is not None:
        ranks, whole = LoopbackRanks(1), LoopbackRanks(request.loopback)
    report({"phase": "check"})
    error, tolerance = adapter.reference_check(
        request.shape, request.config, ranks, request.device, request.provider
    )
    gc.collect()
    if cuda:
        _drop_library_workspace()  # the check's, and earlier trials': an operator without matmuls has none
        torch.cuda.empty_cache()
    report({"phase": "build"})
    runnable = adapter.build(request.shape, request.config, whole, request.device, request.provider)
    if cuda:
        torch.cuda.empty_cache()  # what building left behind is not the operator's reserved memory
    warmups = _warm_up(runnable, ranks, request.device, report)
    peaks = {} if cuda else _tracked_peaks(runnable)
    report({"phase": "peak"})
    samples: list[list[Any]] = []
    beaten_by: Point | None = None
    base_bytes = torch.cuda.memory_allocated() if cuda else _held_bytes(runnable)
    for repeat in range(request.repeats):
        runnable.reset()
        for name, run in runnable.passes.items():
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            seconds = _time(run, ranks, cuda)
            peak = (
                PassPeak(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
                if cuda
                else peaks[name]
            )
            samples.append([name, repeat, seconds, peak.allocated, peak.reserved])
        report({"phase": "repeat", "repeat": repeat + 1, "repeats": request.repeats})
        if repeat == 0 and request.front and request.repeats > 1:
            beaten_by = _beaten_by(request, ranks, samples)
            if beaten_by is not None:
                break
    device_used = None
    if cuda:
        free, total = torch.cuda.mem_get_info()
        device_used = total - free
    answer = {
        "samples": samples,
        "peak_source": "cuda" if cuda else "tracked",
        "base_bytes": base_bytes,
        "library_bytes": _drop_library_workspace() if cuda else 0,
        "host_locked_bytes": runnable.host_locked_bytes,
        "device_used_bytes": device_used,
        "watch": watch.answer(),
        "warmups": warmups,
        "error": error if math.isfinite(error) else None,
        "tolerance": tolerance,
        "pruned": beaten_by,
    }
    del runnable
    gc.collect()  # a warm rank must not carry this trial's graphs into the next one's peak
    gc.freeze()  # what is left are modules: the next collections need not look through them
    return answer


def _beaten_by(request: MeasureRequest, ranks: Ranks, samples: list[list[Any]]) -> Point | None:
    """Whether the front is out of reach after one repeat; all ranks decide alike, by the slowest and the fullest."""
    seconds = [row[2] for row in samples]
    largest = torch.tensor(
        [*seconds, max(row[3] for row in samples)], dtype=torch.float64, device=request.device
    )
    ranks.all_reduce(largest, "max")
    *slowest, peak = largest.tolist()
    return out_of_reach(sum(slowest), int(peak), request.front, request.slack)


def _warm_up(runnable: Runnable, ranks: Ranks, device: str, report: Report) -> int:
    """Repeat until steady; all ranks agree on when that is, by the slowest one's times."""
    last = math.inf
    spent = 0.0
    for done in range(1, _MAX_WARMUPS + 1):
        runnable.reset()
        seconds = sum(_time(run, ranks, device == "cuda") for run in runnable.passes.values())
        slowest = torch.tensor([seconds], dtype=torch.float64, device=device)
        ranks.all_reduce(slowest, "max")
        now = float(slowest)
        spent += now
        report({"phase": "warm-up", "repeat": done})
        steady = max(now, last) <= _STEADY * min(now, last)
        if done >= _MIN_WARMUPS and (steady or spent > _WARMUP_S):
            return done
        last = now
    return _MAX_WARMUPS


def _time(run: Callable[[], None], ranks: Ranks, cuda: bool) -> float:
    """Seconds of one pass, begun by all ranks at the same moment."""
    if not cuda:
        ranks.barrier()
        began = perf_counter()
        run()
        return perf_counter() - began
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    ranks.barrier()
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _tracked_peaks(runnable: Runnable) -> dict[str, PassPeak]:
    """Peaks of an untimed repetition, by counting storages: tracking slows every operation down."""
    runnable.reset()
    peaks = {}
    with PeakTracker() as tracker:
        tracker.adopt(runnable.held)
        for name, run in runnable.passes.items():
            tracker.reset_peak()
            run()
            peaks[name] = PassPeak(tracker.peak_bytes + runnable.held_bytes, None)
    return peaks


def _drop_library_workspace() -> int:
    """Give back what the matmul library keeps in the allocator from call to call, and say how much that was.

    It is part of the measured peak of whatever multiplies, and no operator's tensor: no bound counts it.
    """
    held = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return held - torch.cuda.memory_allocated()


def _held_bytes(runnable: Runnable) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in runnable.held}
    return sum(storages.values()) + runnable.held_bytes
