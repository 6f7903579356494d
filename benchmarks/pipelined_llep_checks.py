"""Is what the benchmark is about to time right? Kernels against torch, a layer against a dense one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from operators.dispatch_launch import DispatchLaunch
from operators.expert_mlp import ExpertWeights
from operators.kernels.route import combine_rows, gather_rows
from operators.kernels.swiglu import GPT_OSS, SWIGLU, Gate, gated, gated_backward_
from operators.pipelined_llep import pipelined_llep
from operators.ranks import LoopbackRanks
from operators.routing import profile


def kernel_checks(device: torch.device) -> list[str]:
    """One line a check; a failure is said, not raised."""
    checks: list[tuple[str, Callable[[torch.device], float], float]] = [
        ("gather of 300,000 x 7,168 rows, last rows", _far_gather, 0.0),
        ("combine against torch, bf16", _combine, 2e-2),
        ("SwiGLU and derivative against torch, bf16", lambda d: _gated(d, SWIGLU), 2e-2),
        ("gpt-oss gate and derivative against torch, bf16", lambda d: _gated(d, GPT_OSS), 2e-2),
        ("layer in bf16 against float32 dense", _layer, 3e-2),
        ("two runs equal bit for bit", _again, 0.0),
    ]
    lines = []
    for name, check, tolerance in checks:
        try:
            error = check(device)
            lines.append(f"{'ok    ' if error <= tolerance else 'WRONG '} {name}: {error:.2e}")
        except Exception as problem:  # reported beside the timings
            lines.append(f"FAILED {name}: {type(problem).__name__}: {str(problem)[:200]}")
    return lines


def _relative(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().cpu().float(), want.detach().cpu().float()
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def _far_gather(device: torch.device) -> float:
    rows, columns = (300_000, 7168) if device.type == "cuda" else (3000, 71)
    source = torch.arange(rows, device=device).remainder_(251).to(torch.bfloat16)
    source = source.unsqueeze(1).expand(rows, columns).contiguous()
    index = torch.arange(rows - 1, -1, -1, device=device, dtype=torch.int32)
    out = gather_rows(source, index)
    wrong = (out[-4:] != source[:4].flip(0)).sum() + (out[:4] != source[-4:].flip(0)).sum()
    positions = index.view(-1, 1)
    combine_rows(source, positions, None, out)
    return float(wrong + (out[-4:] != source[:4].flip(0)).sum())


def _combine(device: torch.device) -> float:
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(512, 384, generator=g).bfloat16()
    positions = torch.randint(0, 512, (200, 6), generator=g, dtype=torch.int32)
    weights = torch.rand(200, 6, generator=g)
    here, there = (
        torch.empty(200, 384, dtype=torch.bfloat16),
        torch.empty(200, 384, dtype=torch.bfloat16).to(device),
    )
    combine_rows(rows, positions, weights, here)
    combine_rows(rows.to(device), positions.to(device), weights.to(device), there)
    return _relative(there, here)


def _gated(device: torch.device, gate: Gate) -> float:
    g = torch.Generator().manual_seed(0)
    values = (torch.randn(300, 2 * 136, generator=g) * 4).bfloat16()
    upstream = torch.randn(300, 136, generator=g).bfloat16()
    weights = torch.rand(300, generator=g)
    answers = []
    for where in (torch.device("cpu"), device):
        v, u = values.to(where).clone(), upstream.to(where).clone()
        h = gated(gate, v)
        dots = gated_backward_(gate, v, u, weights.to(where))
        answers.append((h, v, u, dots))
    return max(_relative(b, a) for a, b in zip(*answers, strict=True))


def _inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, ExpertWeights]:
    g = torch.Generator().manual_seed(0)
    x, s, dy = (torch.randn(*size, generator=g) for size in ((512, 128), (512, 8), (512, 128)))
    up = torch.randn(8, 2 * 64, 128, generator=g) * 128**-0.5
    down = torch.randn(8, 128, 64, generator=g) * 64**-0.5
    x, dy, up, down = (t.bfloat16().to(device, dtype) for t in (x, dy, up, down))
    s = s.sigmoid().to(device)
    return (
        x.requires_grad_(),
        s.requires_grad_(),
        dy,
        ExpertWeights(up.requires_grad_(), down.requires_grad_()),
    )


def _run(device: torch.device, schedule: str) -> list[Tensor]:
    x, s, dy, own = _inputs(device, torch.bfloat16)
    routing = profile("random", 512, 8, 3, device=device)
    launch = DispatchLaunch.for_chunks(3, 512, dispatch_schedule=schedule)  # type: ignore[arg-type]
    y = pipelined_llep(x, s, routing, own, ranks=LoopbackRanks(1), launch=launch)
    y.backward(dy)
    return [y.detach(), *(t.grad for t in (x, s, own.gate_up_EGH, own.down_EHI) if t.grad is not None)]


def _layer(device: torch.device) -> float:
    """A group of one: loopback moves the true rows."""
    x, s, dy, own = _inputs(device, torch.float32)
    routing = profile("random", 512, 8, 3, device=device)
    mix = torch.zeros_like(s).scatter(1, routing.ids_NK, s.gather(1, routing.ids_NK))
    g, u = torch.einsum("nh,egh->eng", x, own.gate_up_EGH).chunk(2, dim=2)
    h = torch.nn.functional.silu(g) * u
    y = torch.einsum("ne,eni,ehi->nh", mix, h, own.down_EHI)
    y.backward(dy)
    want = [y, *(t.grad for t in (x, s, own.gate_up_EGH, own.down_EHI) if t.grad is not None)]
    return max(
        _relative(a, b)
        for schedule in ("serial", "prefetch", "overlap")
        for a, b in zip(_run(device, schedule), want, strict=True)
    )


def _again(device: torch.device) -> float:
    pairs = zip(_run(device, "overlap"), _run(device, "overlap"), strict=True)
    return float(sum(int((a != b).sum()) for a, b in pairs))
