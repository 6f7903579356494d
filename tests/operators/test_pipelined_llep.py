"""PipelinedLLEP against the dense layer, on 1, 2, 4 and 8 gloo ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from operators.dispatch_launch import DispatchLaunch, DispatchSchedule
from operators.expert_baselines import llep, standard_ep
from operators.kernels.swiglu import GPT_OSS, SWIGLU, Gate
from operators.pipelined_llep import pipelined_llep
from operators.ranks import ProcessRanks
from operators.routing import profile
from tests.gang import gang
from tests.operators.dense_moe import Answer, Layer, dense, draw

H, INNER, EXPERTS, TOP_K = 6, 5, 8, 3
PROFILES = ["balanced", "skew:80/2", "skew:95/4", "random", "one_hot", "rank_dependent", "drifting", "ties"]


@dataclass(frozen=True)
class Case:
    profile: str
    tokens: tuple[int, ...]
    chunks: int
    schedule: DispatchSchedule = "serial"
    gate: Gate = SWIGLU
    bias: bool = False
    normalize: bool = False
    migrate: bool = True
    nested: bool = False
    dtype: torch.dtype = torch.float64


def layer_of(case: Case) -> Layer:
    ranks = len(case.tokens)
    routings = [
        profile(case.profile, n, EXPERTS, TOP_K, rank, ranks=ranks) for rank, n in enumerate(case.tokens)
    ]
    return draw(routings, H, INNER, bias=case.bias, dtype=case.dtype)


@cache
def reference(case: Case) -> tuple[Layer, Answer]:
    layer = layer_of(case)
    return layer, dense(layer, case.gate, normalize=case.normalize)


def launch_of(case: Case) -> DispatchLaunch:
    return DispatchLaunch.for_chunks(
        case.chunks,
        max(case.tokens),
        dispatch_schedule=case.schedule,
        min_rows=2,
        lambda_=1.1,
        migrate=case.migrate,
        backward="nested" if case.nested else "chunked",
    )


def errors(ranks: ProcessRanks, cases: list[Case]) -> list[float]:
    """Largest difference to the dense layer over values and gradients, case by case."""
    worst = []
    for case in cases:
        me = ranks.rank
        layer, want = reference(replace(case, chunks=1, schedule="serial", nested=False))
        own = layer.local(me, ranks.size)
        x, s = layer.hidden[me].clone().requires_grad_(), layer.scores[me].clone().requires_grad_()
        y = pipelined_llep(
            x,
            s,
            layer.routings[me],
            own,
            ranks=ranks,
            launch=launch_of(case),
            gate=case.gate,
            normalize=case.normalize,
        )
        y.backward(layer.grads[me])
        pairs = [(y.detach(), want.outputs[me]), (x.grad, want.d_hidden[me]), (s.grad, want.d_scores[me])]
        n = EXPERTS // ranks.size
        for weight, full in zip(own, want.d_weights, strict=True):
            if weight is not None and full is not None:
                pairs.append((weight.grad, full[me * n : (me + 1) * n]))
        difference = 0.0
        for got, right in pairs:
            assert got is not None
            assert got.shape == right.shape
            if got.numel():
                difference = max(difference, float((got.double() - right).abs().max()))
        worst.append(difference)
    return worst


def check(ranks: int, cases: list[Case], tolerance: float = 1e-10) -> None:
    for rank, found in enumerate(gang(ranks).run(errors, cases)):
        for case, error in zip(cases, found, strict=True):
            assert error <= tolerance, f"rank {rank}: {error} for {case}"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_equals_the_dense_layer_for_every_profile_and_chunk_count(ranks: int) -> None:
    tokens = 14
    check(ranks, [Case(name, (tokens,) * ranks, k) for name in PROFILES for k in (1, 2, 3, 7, tokens)])


def test_eight_ranks() -> None:
    check(8, [Case(name, (9,) * 8, k) for name in PROFILES for k in (1, 2, 3, 7, 9)])


@pytest.mark.parametrize("ranks", [1, 4])
def test_schedules_gates_biases_and_the_nested_form(ranks: int) -> None:
    tokens = (11,) * ranks
    forms: list[tuple[DispatchSchedule, bool]] = [("prefetch", False), ("overlap", False), ("serial", True)]
    cases = [
        Case(name, tokens, k, schedule=schedule, nested=nested)
        for name in ("skew:80/2", "random")
        for k in (1, 3)
        for schedule, nested in forms
    ]
    tight = Gate(alpha=1.702, limit=0.3, interleaved=True)
    cases += [
        Case("skew:80/4", tokens, 3, "serial", GPT_OSS, bias=True),
        Case("skew:80/4", tokens, 3, "overlap", GPT_OSS, bias=True, normalize=True),
        Case("skew:80/4", tokens, 3, "serial", GPT_OSS, bias=True, normalize=True, nested=True),
        Case("skew:80/4", tokens, 3, "prefetch", SWIGLU, bias=True, normalize=True),
        Case("skew:80/4", tokens, 3, "serial", tight),
    ]
    cases += [Case("skew:80/2", tokens, 3, migrate=False), Case("one_hot", tokens, 3, migrate=False)]
    check(ranks, cases)


def test_unequal_ranks_empty_ranks_and_more_chunks_than_tokens() -> None:
    knobs: list[tuple[int, DispatchSchedule]] = [(1, "serial"), (4, "overlap"), (9, "prefetch")]
    cases = [
        Case(name, tokens, k, schedule=schedule)
        for name in ("one_hot", "random", "skew:80/2")
        for tokens in ((9, 0, 5, 1), (0, 0, 3, 0), (0, 0, 0, 0))
        for k, schedule in knobs
    ]
    # The last rank has no tokens and, with its experts unpicked, no rows either: it still takes part.
    cases += [Case("one_hot", (2, 0, 3, 0), k, schedule=schedule, migrate=False) for k, schedule in knobs]
    check(4, cases)


def _grads(ranks: ProcessRanks, case: Case, provider: str) -> list[torch.Tensor]:
    layer, me = layer_of(case), ranks.rank
    own = layer.local(me, ranks.size)
    x, s = layer.hidden[me].clone().requires_grad_(), layer.scores[me].clone().requires_grad_()
    launch = launch_of(case)
    if provider == "flatpeak":
        y = pipelined_llep(x, s, layer.routings[me], own, ranks=ranks, launch=launch)
    elif provider == "standard_ep":
        y = standard_ep(x, s, layer.routings[me], own, ranks=ranks, launch=launch)
    else:
        recompute = provider == "llep_recompute"
        y = llep(x, s, layer.routings[me], own, ranks=ranks, launch=launch, recompute=recompute)
    y.backward(layer.grads[me])
    return [y.detach(), *(t.grad for t in (x, s, *own) if t is not None and t.grad is not None)]


def _equal_bits(ranks: ProcessRanks, case: Case) -> dict[str, bool]:
    first = _grads(ranks, case, "flatpeak")

    def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
        return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

    out = {"again": same(first, _grads(ranks, case, "flatpeak"))}
    if case.chunks == 1:
        kind = "llep" if case.migrate else "standard_ep"
        out["baseline"] = same(first, _grads(ranks, case, kind))
        if case.migrate:
            out["recompute"] = same(first, _grads(ranks, case, "llep_recompute"))
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_agree_bit_for_bit_and_one_chunk_equals_the_baselines(dtype: torch.dtype) -> None:
    for case in (
        Case("skew:80/2", (13, 13), 1, dtype=dtype),
        Case("skew:80/2", (13, 13), 1, migrate=False, dtype=dtype),
        Case("random", (13, 13), 3, schedule="overlap", dtype=dtype),
    ):
        for found in gang(2).run(_equal_bits, case):
            assert all(found.values()), (case, found)
