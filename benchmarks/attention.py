"""Rate of causal attention: the largest term of a long-context step, measured instead of assumed.

    python -m benchmarks.attention --out rows.csv       # one GPU, half a minute
    python -m benchmarks.attention --tiny               # CPU, seconds

FLOPs are those of the latency model: a token sees half the context, 2·heads·(d_qk + d_v) a pair forward, and 2.5
times that backward. The limit beside it is a dense bf16 matmul of the same run.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch.nn.functional import scaled_dot_product_attention

BACKWARD = 2.5
COLUMNS = ("case", "length", "heads", "kv_heads", "head_dim", "pass", "seconds", "flops_per_s", "of_gemm")


@dataclass(frozen=True, slots=True)
class Case:
    """One sequence per call: ``length`` tokens, causal, kv heads shared by groups of query heads."""

    name: str
    length: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def flops(self) -> float:
        """Forward FLOPs."""
        return self.length * 4.0 * self.heads * self.head_dim * self.length / 2.0


CASES = tuple(
    Case(name, length, heads, kv_heads, dim)
    for name, heads, kv_heads, dim in (
        ("gpt-oss, D=8", 8, 1, 64),
        ("gpt-oss, D=2", 32, 4, 64),
        ("width 128, D=8", 8, 1, 128),
        ("width 112, D=8", 8, 1, 112),
    )
    for length in (8192, 32768, 131072)
    if heads * length <= 32 * 32768
)
TINY = (Case("tiny", 256, 4, 2, 32),)


def timed(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of ``work``, after one warm-up."""
    work()
    seconds = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(perf_counter() - start)
    return median(seconds)


def gemm_rate(device: torch.device, dtype: torch.dtype, n: int) -> float:
    """FLOP/s of an n³ matmul on random data."""
    left, right = torch.randn(n, n, device=device, dtype=dtype), torch.randn(n, n, device=device, dtype=dtype)
    return 2.0 * n**3 / timed(lambda: torch.mm(left, right), device, 5)


def measure(case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Seconds of forward, and of backward alone."""

    def heads(count: int) -> torch.Tensor:
        return torch.randn(
            1, count, case.length, case.head_dim, device=device, dtype=dtype, requires_grad=True
        )

    q, k, v = heads(case.heads), heads(case.kv_heads), heads(case.kv_heads)
    gradient = torch.randn_like(q)

    def forward() -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def both() -> None:
        torch.autograd.grad(forward(), (q, k, v), gradient)

    repeats = 3 if case.length > 32768 else 5
    ahead = timed(forward, device, repeats)
    return {"forward": ahead, "backward": timed(both, device, repeats) - ahead}


def main() -> None:
    """Measure every case and print rates beside the matmul's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="CSV of rates")
    parser.add_argument("--tiny", action="store_true", help="one small case on the CPU")
    options = parser.parse_args()
    device = torch.device("cpu" if options.tiny or not torch.cuda.is_available() else "cuda")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    gemm = gemm_rate(device, dtype, 512 if device.type == "cpu" else 8192)
    rows = []
    for case in TINY if device.type == "cpu" else CASES:
        for name, seconds in measure(case, device, dtype).items():
            rate = case.flops * (1.0 if name == "forward" else BACKWARD) / seconds
            rows.append(
                (
                    case.name,
                    case.length,
                    case.heads,
                    case.kv_heads,
                    case.head_dim,
                    name,
                    seconds,
                    rate,
                    rate / gemm,
                )
            )
            print(
                f"{case.name:16} {case.length:>7} {name:9} {seconds * 1e3:9.2f} ms {rate / 1e12:8.2f} TFLOP/s"
            )
    print(json.dumps({"gemm_flops_per_s": gemm}))
    if options.out:
        with options.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows(rows)


if __name__ == "__main__":
    main()
