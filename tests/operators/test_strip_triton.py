"""The Triton epilogues equal the torch ones, in Triton's interpreter.

The interpreter must be chosen before Triton is imported, so the comparison runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed on this platform")

_ROOT = Path(__file__).parents[2]


def compare() -> float:
    """Largest relative deviation of the Triton kernels from the torch path, over shapes and dtypes."""
    import torch

    from operators.kernels import strip, strip_triton

    torch.manual_seed(0)
    worst = 0.0
    for dtype, (rows, columns) in (
        (torch.float32, (3, 5000)),
        (torch.float32, (2, 4096)),
        (torch.bfloat16, (3, 37)),
        (torch.bfloat16, (1, 1)),
    ):
        for with_bias in (False, True):
            padded = torch.randn(rows, columns + 3).to(dtype)
            tile = padded[:, :columns]
            tile[0, : columns // 2] = -torch.inf
            if rows > 2:
                tile[2] = -torch.inf  # a shard without any finite logit
            bias = torch.randn(columns) if with_bias else None
            targets = torch.tensor([100 + columns - 1, 99, -100][:rows])
            ours, theirs = torch.empty(rows, 3), torch.empty(rows, 3)
            strip_triton.statistics(tile, bias, targets, 100, ours)
            strip.strip_statistics(tile, bias, targets, 100, theirs)
            finite = torch.isfinite(theirs)
            assert torch.equal(ours[~finite], theirs[~finite])
            worst = max(worst, float(((ours - theirs)[finite] / theirs[finite].abs().clamp(1)).abs().max()))
            log_sum_exp = theirs[:, 0] + theirs[:, 1].log()
            upstream = torch.tensor([0.5, 0.0, 2.0])[:rows]
            mine, right = padded.clone(), padded.clone()
            per_row = {"log_sum_exp_n": log_sum_exp, "upstream_n": upstream}
            strip_triton.gradient_(mine[:, :columns], bias, targets, 100, **per_row)
            strip.strip_gradient_(right[:, :columns], bias, targets, 100, **per_row)
            assert torch.equal(mine[:, columns:], padded[:, columns:]), "wrote beyond its columns"
            # the interpreter's rounding to bf16 may differ by one unit in the last place
            rounding = 1.0 if dtype is torch.float32 else 1e-3
            worst = max(worst, rounding * float((mine - right)[:, :columns].abs().max()))
    return worst


def test_triton_epilogues_equal_torch_in_the_interpreter() -> None:
    command = "from tests.operators.test_strip_triton import compare; print(compare())"
    done = subprocess.run(
        [sys.executable, "-c", command],
        cwd=_ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout) < 1e-5
