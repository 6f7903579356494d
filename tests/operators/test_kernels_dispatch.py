"""Row kernels: Triton in its interpreter against torch, and the torch gate against autograd."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from operators.kernels.swiglu import GPT_OSS, SWIGLU, Gate, gated, gated_backward_


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not built for this platform"
)
def test_triton_kernels_equal_the_torch_path() -> None:
    root = Path(__file__).parents[2]
    # The interpreter must be chosen before Triton is imported, hence a process of its own.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.operators.kernels_interpreted"],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("gate", [SWIGLU, GPT_OSS, Gate(1.702, 0.5, interleaved=True)])
def test_gate_gradient_equals_autograd(gate: Gate) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(33, 14, generator=generator, dtype=torch.float64).requires_grad_()
    upstream = torch.randn(33, 7, generator=generator, dtype=torch.float64)
    weights = torch.rand(33, generator=generator, dtype=torch.float64)
    g, u = gate.split(values)
    if gate.limit is not None:
        g, u = g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit) + 1
    h = g * torch.sigmoid(gate.alpha * g) * u
    (h * upstream * weights[:, None]).sum().backward()
    assert values.grad is not None
    mine, second = values.detach().clone(), upstream.clone()
    assert torch.allclose(gated(gate, mine), h.detach())
    dots = gated_backward_(gate, mine, second, weights)
    assert torch.allclose(mine, values.grad)
    assert torch.allclose(second, (h * weights[:, None]).detach())
    assert torch.allclose(dots, (h * upstream).sum(1).detach())
