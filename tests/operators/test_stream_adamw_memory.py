"""What a step allocates: nothing of the parameters' size, and nothing that stays."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from operators.bounds.stream_adamw import stream_adamw_terms
from operators.dry_run import PeakTracker, dry_run
from operators.errors import RuleError
from operators.stream_adamw import OffloadStreamAdamW

SMALL = 4096
"""Norms, coefficients and counters."""


@pytest.mark.parametrize(
    ("engine", "share"), [("stream", 0.0), ("split", 0.3), ("host", 0.0), ("device", 0.0)]
)
def test_the_peak_is_the_bound(engine: Any, share: float) -> None:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s).bfloat16()) for s in (64 * 300, 64 * 5, 64 * 200)]
    with PeakTracker() as tracked:
        optimizer = OffloadStreamAdamW(
            params,
            engine=engine,
            host_share=share,
            bucket_params=6400,
            staging_slots=2,
            max_grad_norm=1.0,
            host_memory=None if engine == "device" else torch.empty(10**6, dtype=torch.uint8),
        )
        built = tracked.live_bytes
        lent = 0 if engine == "device" else 10**6
        for _ in range(3):
            with torch.no_grad():
                params[0].mul_(1.5)  # masters are rebuilt, too
            for p in params:
                p.grad = torch.ones_like(p)
            gradients = sum(p.nbytes for p in params)
            optimizer.step()
    bound = sum(
        stream_adamw_terms(
            params=optimizer.flat_params,
            bucket_params=optimizer.bucket_params,
            staging_slots=2,
            engine=engine,
            host_share=share,
        ).values()
    )
    assert bound + lent <= built <= bound + lent + SMALL
    # The host's pass rebuilds masters with one segment's fp32 copy in host memory.
    rebuild = 0 if engine in {"stream", "device"} else 4 * optimizer.bucket_params
    assert tracked.peak_bytes <= bound + lent + 2 * gradients + rebuild + SMALL


def fake_run(engine: Any, params: int) -> int:
    """Peak of building and stepping under fake tensors, without weights, gradients and host memory."""

    def build() -> list[torch.Tensor]:
        weight = torch.nn.Parameter(torch.empty(params, dtype=torch.bfloat16))
        weight.grad = torch.empty_like(weight)
        return [weight, weight.grad, torch.empty(13 * params, dtype=torch.uint8)]

    def step(weight: torch.Tensor, grad: torch.Tensor, memory: torch.Tensor) -> OffloadStreamAdamW:
        optimizer = OffloadStreamAdamW(
            [weight],
            engine=engine,
            bucket_params=32_000_000,
            staging_slots=3,
            max_grad_norm=1.0 if engine != "host" else None,
            host_memory=None if engine == "device" else memory,
        )
        optimizer.step()
        return optimizer

    return dry_run(build, step).peak_bytes - (4 + 13) * params


@pytest.mark.parametrize("engine", ["stream", "device"])
def test_a_dry_run_at_full_size_gives_the_bound(engine: Any) -> None:
    params = 1_600_000_000
    terms = stream_adamw_terms(params=params, bucket_params=32_000_000, staging_slots=3, engine=engine)
    assert fake_run(engine, params) == pytest.approx(sum(terms.values()), rel=1e-4)


def test_a_dry_run_of_the_compiled_pass_is_refused() -> None:
    with pytest.raises(RuleError, match="needs real memory"):
        fake_run("host", 1_600_000_000)


@pytest.mark.parametrize("engine", ["stream", "split", "host", "device"])
def test_fifty_steps_keep_nothing(engine: Any) -> None:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s).bfloat16()) for s in (700, 65, 3)]
    optimizer = OffloadStreamAdamW(
        params,
        engine=engine,
        host_share=0.5 if engine == "split" else 0.0,
        bucket_params=128,
        max_grad_norm=1.0,
    )
    after = []
    with PeakTracker() as tracked:
        for number in range(50):
            for index, p in enumerate(params):
                p.grad = None if (number + index) % 5 == 0 else torch.randn(p.shape).bfloat16()
            optimizer.step()
            optimizer.zero_grad()
            if number in (9, 49):
                gc.collect()
                after.append(tracked.live_bytes)
    assert after[0] == after[1]
