"""Checks that a head must pass on the device before its times mean anything."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from operators.bounds.ring_dtp import ring_dtp_terms
from operators.kernels.strip import strip_gradient_, strip_statistics, uses_triton
from operators.ranks import LoopbackRanks
from operators.ring_dtp import ring_dtp


def self_check(device: torch.device, *, tiny: bool) -> list[str]:
    """Run all checks; returns what they found, raises AssertionError when one fails."""
    torch.manual_seed(0)
    notes = [_weight_error_is_flat(device, tiny), _epilogues_equal_torch(device, tiny)]
    notes.append(_loopback_equals_dense(device))
    if device.type == "cuda":
        notes += [_last_row_of_a_long_tile(device), _no_hidden_temporary(device)]
    return notes


def _weight_error_is_flat(device: torch.device, tiny: bool) -> str:
    tokens, hidden, vocab = (512, 64, 100) if tiny else (4096, 256, 1000)
    x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
    w = torch.randn(vocab, hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    t = torch.randint(0, vocab, (tokens,), device=device)
    exact = w.detach().double().requires_grad_()
    functional.cross_entropy(x.double() @ exact.t(), t).backward()
    assert exact.grad is not None
    found = []
    for mode in ("activations", "weights", "gather"):
        errors = []
        for tiles in (1, 16, min(1024, tokens)):
            loss = ring_dtp(x, w, t, ranks=LoopbackRanks(1), mode=mode, strip_rows=tokens // tiles)
            (grad,) = torch.autograd.grad(loss, w)
            errors.append(float((grad.double() - exact.grad).norm() / exact.grad.norm()))
        assert max(errors) < 1.2 * min(errors), (mode, errors)
        found.append(f"{mode} " + ", ".join(f"{e:.2e}" for e in errors))
    return "bf16 weight-gradient error against fp64 in 1, 16, 1024 tiles: " + "; ".join(found)


def _epilogues_equal_torch(device: torch.device, tiny: bool) -> str:
    rows, columns = (8, 300) if tiny else (257, 25_003)
    worst = 0.0
    for dtype in (torch.float32, torch.bfloat16):
        tile = torch.randn(rows, columns, device=device).mul_(4).to(dtype)
        tile[1] = -torch.inf
        tile[2, : columns // 2] = -torch.inf
        bias = torch.randn(columns, device=device)
        targets = torch.randint(-50, columns + 50, (rows,), device=device)
        got, right = _statistics(tile, bias, targets), _statistics(tile.cpu(), bias.cpu(), targets.cpu())
        finite = torch.isfinite(right)
        assert torch.equal(got.cpu()[~finite], right[~finite])
        worst = max(worst, float(((got.cpu() - right)[finite] / right[finite].abs().clamp(1)).abs().max()))
        lse, upstream = right[:, 0] + right[:, 1].log(), torch.rand(rows)
        reference = tile.float().cpu()
        strip_gradient_(tile, bias, targets, 0, log_sum_exp_n=lse.to(device), upstream_n=upstream.to(device))
        strip_gradient_(reference, bias.cpu(), targets.cpu(), 0, log_sum_exp_n=lse, upstream_n=upstream)
        difference = (tile.float().cpu() - reference).abs()
        allowed = 1e-6 + (2**-8 if dtype is torch.bfloat16 else 1e-4) * reference.abs()
        assert (difference <= allowed).all(), float((difference - allowed).max())
    assert worst < 1e-4, worst
    kind = "Triton" if uses_triton(tile) else "torch"
    return f"{kind} epilogues against torch on the CPU: statistics differ by {worst:.1e} relative at most"


def _statistics(tile: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    out = torch.empty(tile.shape[0], 3, device=tile.device)
    strip_statistics(tile, bias, targets, 0, out)
    return out


def _loopback_equals_dense(device: torch.device) -> str:
    # shards travelling in loopback are copies of the own one: the dense head of the repeated shard
    x = torch.randn(100, 64, device=device)
    w = torch.randn(40, 64, device=device)
    t = torch.randint(0, 320, (100,), device=device)
    right = functional.cross_entropy(x.double() @ w.repeat(8, 1).double().t(), t)
    worst = 0.0
    for hop in ("serial", "overlapped"):
        loss = ring_dtp(x, w, t, ranks=LoopbackRanks(8), mode="weights", strip_rows=64, gradient_hop=hop)
        worst = max(worst, abs(float(loss) * 8 - float(right)))  # the mean is over 8 ranks' tokens
    assert worst < 1e-2, worst
    return f"eight rounds in loopback against a dense head: loss differs by {worst:.1e}"


def _last_row_of_a_long_tile(device: torch.device) -> str:
    rows, columns = 9000, 250_000  # 2.25e9 elements: offsets beyond 2³¹
    tile = torch.empty(rows, columns, device=device, dtype=torch.bfloat16)
    tile[-2:] = torch.randn(2, columns, device=device)
    kept = tile[-2:].float()
    targets = torch.full((rows,), columns - 1, device=device)
    out = torch.empty(rows, 3, device=device)
    strip_statistics(tile, None, targets, 0, out)
    lse = torch.logsumexp(kept, 1)
    torch.testing.assert_close(out[-2:, 0] + out[-2:, 1].log(), lse, rtol=1e-5, atol=1e-5)
    everywhere = torch.zeros(rows, device=device)
    everywhere[-2:] = lse
    strip_gradient_(
        tile, None, targets, 0, log_sum_exp_n=everywhere, upstream_n=torch.ones(rows, device=device)
    )
    kept = torch.softmax(kept, 1)
    kept[:, -1] -= 1
    torch.testing.assert_close(tile[-2:].float(), kept, rtol=1e-2, atol=1e-8)
    return "rows beyond 2³¹ elements are right"


def _no_hidden_temporary(device: torch.device) -> str:
    tokens, hidden, vocab, rows = 4096, 1024, 32_768, 1024
    found = []
    for mode in ("activations", "weights", "gather"):
        for measured in (False, True):  # the first time, libraries take their workspace
            torch.cuda.synchronize()
            base = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16).requires_grad_()
            w = torch.randn(vocab // 8, hidden, device=device, dtype=torch.bfloat16).requires_grad_()
            t = torch.randint(0, vocab, (tokens,), device=device)
            ring_dtp(x, w, t, ranks=LoopbackRanks(8), mode=mode, strip_rows=rows).backward()
            peak = torch.cuda.max_memory_allocated() - base
            if measured:
                terms = ring_dtp_terms(
                    tokens=tokens,
                    hidden=hidden,
                    vocab=vocab,
                    vocab_ranks=8,
                    ring_mode=mode,
                    strip_rows=rows,
                    pass_="backward",
                )
                assert peak <= sum(terms.values()), (mode, peak, terms)
                found.append(f"{mode} {peak / 2**20:.0f} of {sum(terms.values()) / 2**20:.0f}")
            del x, w, t
    return "peak within the bound at V = 32,768, H = 1024 (MiB): " + ", ".join(found)
