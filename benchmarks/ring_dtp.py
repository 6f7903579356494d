"""Ring-DTP on one device at full scale (loopback: no peers, no links), against its limits and its rivals.

    python -m benchmarks.ring_dtp --out rows.csv     # one H200, about three minutes
    python -m benchmarks.ring_dtp --tiny             # a laptop, seconds

What limits it: the ring modes their four GEMMs, ``gather`` three; both are timed alone in the same run.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.ring_dtp_check import self_check
from benchmarks.ring_dtp_peers import Gemms, peers
from benchmarks.rows import COLUMNS, commit, hardware_id
from operators.bounds.ring_dtp import default_strip_rows, ring_dtp_terms
from operators.dry_run import PeakTracker, dry_run
from operators.head_baselines import materialised_head
from operators.ranks import LoopbackRanks
from operators.ring_dtp import OPERATOR_VERSION, GradientHop, RingMode, ring_dtp

_GIB = 2**30


@dataclass
class Row:
    """One measured way to compute a head."""

    provider: str
    config: dict[str, object]
    tokens: int
    dtype: torch.dtype
    pass_: str
    seconds: list[float] = field(default_factory=list)
    allocated: int = 0
    reserved: int = 0
    note: str = ""

    @property
    def best(self) -> float:
        return statistics.median(self.seconds)


class Bench:
    """The shape, the clock, and the rows found so far."""

    def __init__(self, *, tiny: bool, repeats: int) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.cuda = self.device.type == "cuda"
        self.tiny, self.repeats = tiny, repeats
        self.hidden, self.vocab, self.ranks = (64, 1000, 8) if tiny else (7168, 200_000, 8)
        self.rows: list[Row] = []

    def inputs(self, tokens: int, rows: int, dtype: torch.dtype, grad: bool) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator(self.device).manual_seed(0)
        x = torch.randn(tokens, self.hidden, generator=generator, device=self.device, dtype=dtype)
        w = torch.randn(rows, self.hidden, generator=generator, device=self.device, dtype=dtype)
        w.mul_(self.hidden**-0.5)
        t = torch.randint(0, self.vocab, (tokens,), generator=generator, device=self.device)
        return x.requires_grad_(grad), w.requires_grad_(grad), t

    def head(
        self, row: Row, vocab_rows: int, head: Callable[[Tensor, Tensor, Tensor], Tensor], repeats: int
    ) -> None:
        """Time and peak of a head: inputs, outputs and gradients counted."""
        backward = row.pass_ == "forward_backward"
        self._clear()
        tracker = None if self.cuda else PeakTracker()
        x, w, t = self.inputs(row.tokens, vocab_rows, row.dtype, backward)

        def step() -> None:
            x.grad = w.grad = None
            with torch.set_grad_enabled(backward):
                loss = head(x, w, t)
            if backward:
                loss.backward()

        if tracker is not None:
            with tracker:
                tracker.adopt(x, w, t)
                step()
            row.allocated = tracker.peak_bytes
        self._time(row, step, repeats)
        self._done(row)

    def gemms(self, tokens: int, dtype: torch.dtype, pass_: str, repeats: int, *, twice: bool = True) -> Row:
        """The products alone; the limit of everything else."""
        self._clear()
        row = Row("gemms", {"logits": 2 if twice else 1}, tokens, dtype, pass_)
        x, w, _ = self.inputs(tokens, self.vocab // self.ranks, dtype, False)
        products = Gemms(x, w, self.ranks, logits_twice=twice)
        self._time(row, products.forward if pass_ == "forward" else products.forward_backward, repeats)
        self._done(row)
        return row

    def ring(
        self,
        tokens: int,
        dtype: torch.dtype,
        mode: RingMode,
        *,
        pass_: str = "forward_backward",
        ranks: int | None = None,
        hop: GradientHop = "serial",
        strip_rows: int | None = None,
        repeats: int | None = None,
    ) -> Row:
        ranks = ranks or self.ranks
        columns = self.vocab if mode == "gather" else self.vocab // ranks
        default = default_strip_rows(columns, dtype.itemsize, gathered=mode == "gather")
        rows = min(strip_rows or default, tokens)
        config: dict[str, object] = {"ring_mode": mode, "strip_rows": rows, "vocab_ranks": ranks}
        if hop != "serial":
            config["gradient_hop"] = hop
        row = Row("flatpeak", config, tokens, dtype, pass_)

        def head(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
            return ring_dtp(x, w, t, ranks=LoopbackRanks(ranks), mode=mode, strip_rows=rows, gradient_hop=hop)

        bound = max(
            sum(
                ring_dtp_terms(
                    tokens=tokens,
                    hidden=self.hidden,
                    vocab=self.vocab,
                    vocab_ranks=ranks,
                    ring_mode=mode,
                    strip_rows=rows,
                    pass_=one,
                    scalar_bytes=dtype.itemsize,
                    gradient_hop=hop,
                ).values()
            )
            for one in (("forward", "backward") if pass_ == "forward_backward" else ("forward",))
        )
        row.note = f"bound {bound / _GIB:.2f}"
        if dtype is torch.float32 and pass_ == "forward_backward":
            row.note += f", dry run {self._dry(tokens, dtype, self.vocab // ranks, head) / _GIB:.2f}"
        self.head(row, self.vocab // ranks, head, self.repeats if repeats is None else repeats)
        return row

    def _dry(
        self, tokens: int, dtype: torch.dtype, rows: int, head: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> int:
        def build() -> tuple[Tensor, ...]:
            x = torch.empty(tokens, self.hidden, dtype=dtype, requires_grad=True)
            w = torch.empty(rows, self.hidden, dtype=dtype, requires_grad=True)
            return x, w, torch.empty(tokens, dtype=torch.int64)

        def step(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
            loss = head(x, w, t)
            loss.backward()
            return loss

        return dry_run(build, step).peak_bytes

    def peer(self, name: str, tokens: int, dtype: torch.dtype, pass_: str, repeats: int) -> Row | None:
        """Another head over the whole vocabulary, or None if it cannot run here (its reason is printed)."""
        head = materialised_head if name == "materialised" else peers()[name]
        row = Row(name, {}, tokens, dtype, pass_)
        try:
            self.head(row, self.vocab, head, repeats)
        except Exception as error:  # another project's failure must not end the run
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            self._clear()
            return None
        return row

    def _time(self, row: Row, step: Callable[[], None], repeats: int) -> None:
        if repeats > 1:
            step()  # kernels are compiled, libraries take their workspace
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        for _ in range(repeats):
            start = time.perf_counter()
            step()
            if self.cuda:
                torch.cuda.synchronize()
            row.seconds.append(time.perf_counter() - start)
        if self.cuda:
            row.allocated = torch.cuda.max_memory_allocated()
            row.reserved = torch.cuda.max_memory_reserved()

    def _done(self, row: Row) -> None:
        self.rows.append(row)
        print(_line(row), flush=True)

    def _clear(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def measure(bench: Bench) -> list[str]:
    """All measurements; returns the lines of the verdict."""
    few, many, most = (256, 512, 2048) if bench.tiny else (16_384, 32_768, 131_072)
    once, some = 1, bench.repeats
    half, full, both = torch.bfloat16, torch.float32, "forward_backward"
    verdict: list[str] = []

    limit, three = bench.gemms(few, half, both, some), bench.gemms(few, half, both, some, twice=False)
    rings: tuple[RingMode, ...] = ("activations", "weights")
    for mode in rings:
        default = bench.ring(few, half, mode)
        for rows in (4096, 16_384) if not bench.tiny else (64,):
            bench.ring(few, half, mode, strip_rows=rows)
        bench.ring(few, half, mode, hop="overlapped")
        fastest = min(
            (r for r in bench.rows if r.provider == "flatpeak" and r.config["ring_mode"] == mode),
            key=lambda r: r.best,
        )
        verdict.append(
            f"bf16 {mode}: {default.best * 1e3:.1f} ms = {default.best / limit.best:.3f} x its four GEMMs "
            f"({limit.best * 1e3:.1f} ms), fastest {fastest.best / limit.best:.3f} x {fastest.config}; aim 1.06"
        )
    gather = bench.ring(few, half, "gather")
    bench.ring(few, half, "gather", ranks=1)
    for rows in (2048, 8192) if not bench.tiny else ():
        bench.ring(few, half, "gather", strip_rows=rows)
    rivals = {name: bench.peer(name, few, half, both, some) for name in peers()}
    liger = rivals.get("liger_fp32")
    verdict.append(
        f"bf16 gather: {gather.best * 1e3:.1f} ms, {gather.allocated / _GIB:.2f} GiB; three GEMMs "
        f"{three.best * 1e3:.1f} ms; Liger fp32 "
        + (
            f"{liger.best * 1e3:.1f} ms, {liger.allocated / _GIB:.2f} GiB"
            if liger
            else "not installed (252 ms)"
        )
        + "; aim 1.00 x"
    )
    pairs: tuple[tuple[int, RingMode, float, float], ...] = (
        (few, "activations", 3.7, 4.2),
        (many, "weights", 5.3, 6.0),
    )
    for tokens, mode, serial, overlapped in pairs:
        peak = bench.ring(tokens, full, mode, repeats=once).allocated
        other = bench.ring(tokens, full, mode, hop="overlapped", repeats=once).allocated
        ours = bench.ring(tokens, full, mode, pass_="forward", repeats=2)
        whole = bench.peer("materialised", tokens, full, "forward", 2)
        verdict.append(
            f"fp32 N={tokens} {mode}: {peak / _GIB:.2f} GiB serial (aim {serial}), {other / _GIB:.2f} overlapped "
            f"(aim {overlapped}); forward "
            + (f"{ours.best / whole.best:.3f} x materialised (aim 1.05)" if whole else f"{ours.best:.2f} s")
        )
    long_limit = bench.gemms(most, half, both, 2)
    long = bench.ring(most, half, "weights", repeats=2)
    verdict.append(
        f"bf16 N={most} weights: {long.best / long_limit.best:.3f} x its four GEMMs, "
        f"{long.allocated / _GIB:.2f} GiB"
    )
    longest = bench.ring(most, full, "weights", repeats=once)
    verdict.append(f"fp32 N={most} weights: {longest.allocated / _GIB:.2f} GiB")
    return verdict


def _line(row: Row) -> str:
    config = " ".join(f"{k}={v}" for k, v in row.config.items())
    dtype = str(row.dtype).removeprefix("torch.")
    return (
        f"{row.provider:24}{dtype:9} N={row.tokens:<7}{row.pass_:17}{row.best * 1e3:10.1f} ms"
        f"{row.allocated / _GIB:8.2f} GiB  {config}  {row.note}"
    )


def write_rows(bench: Bench, path: Path) -> None:
    """Samples, one a repeat."""
    hardware, revision = hardware_id(), commit()
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for row in bench.rows:
            shape = {
                "tokens": row.tokens,
                "hidden": bench.hidden,
                "vocab": bench.vocab,
                "vocab_ranks": bench.ranks,
                "dtype": str(row.dtype).removeprefix("torch."),
            }
            for repeat, seconds in enumerate(row.seconds):
                values = ["ring_dtp", row.provider, json.dumps(row.config), json.dumps(shape), row.pass_, 0]
                values += [repeat, seconds, row.allocated, row.reserved, "cuda" if bench.cuda else "tracked"]
                writer.writerow([*values, hardware, OPERATOR_VERSION, revision])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="CSV of samples")
    parser.add_argument("--tiny", action="store_true", help="toy shapes, for a machine without a GPU")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    bench = Bench(tiny=options.tiny, repeats=options.repeats)
    if not bench.cuda and not options.tiny:
        parser.error("full scale needs a CUDA device; use --tiny here")
    for note in self_check(bench.device, tiny=options.tiny):
        print(f"check: {note}", flush=True)
    verdict = measure(bench)
    if options.out is not None:
        write_rows(bench, options.out)
    print("\n" + "\n".join(verdict))


if __name__ == "__main__":
    main()
