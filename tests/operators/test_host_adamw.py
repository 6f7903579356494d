"""The host's update: the compiled pass against torch's fused CPU AdamW, and the choice between them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from operators.adamw_math import Hyper
from operators.errors import RuleError
from operators.host_adamw import HostUpdate, NativeUpdate, PlainUpdate, host_update, load_library

DTYPES = st.sampled_from([torch.bfloat16, torch.float32])


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Build afresh: a library left by another run must not hide a source that no longer compiles."""
    patch = pytest.MonkeyPatch()
    patch.setenv("FLATPEAK_CACHE", str(tmp_path_factory.mktemp("kernels")))
    load_library.cache_clear()
    host_update("native")
    patch.undo()


def run(
    update: HostUpdate, n: int, grad_dtype: torch.dtype, weight_dtype: torch.dtype, hyper: Hyper, scale: float
) -> list[Tensor]:
    torch.manual_seed(n)
    master, exp_avg, exp_avg_sq = torch.randn(n), torch.zeros(n), torch.zeros(n)
    weight = torch.empty(n, dtype=weight_dtype)
    for step in (1, 2, 3):
        grad = torch.randn(n).to(grad_dtype)
        update(master, exp_avg, exp_avg_sq, grad, weight, hyper=hyper, step=step, scale=scale, threads=2)
    return [master, exp_avg, exp_avg_sq, weight]


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 300) | st.sampled_from([16384, 16385, 50_003]),
    grad_dtype=DTYPES,
    weight_dtype=DTYPES,
    beta1=st.sampled_from([0.0, 0.3, 0.9]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    scale=st.sampled_from([1.0, 0.37]),
)
def test_the_compiled_pass_stays_within_two_units_of_torchs(
    n: int,
    grad_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    beta1: float,
    weight_decay: float,
    scale: float,
) -> None:
    hyper = Hyper(1e-2, beta1, 0.999, 1e-8, weight_decay)
    native = run(host_update("native"), n, grad_dtype, weight_dtype, hyper, scale)
    plain = run(PlainUpdate(), n, grad_dtype, weight_dtype, hyper, scale)
    for ours, torchs in zip(native[:3], plain[:3], strict=True):
        torch.testing.assert_close(ours, torchs, rtol=3e-7, atol=1e-9)
    torch.testing.assert_close(
        native[3], plain[3], rtol=2**-7 if weight_dtype == torch.bfloat16 else 3e-7, atol=1e-9
    )
    assert torch.equal(native[3], native[0].to(weight_dtype))


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_weights_stored_past_the_caches_are_the_same_at_any_address(weight_dtype: torch.dtype) -> None:
    through, past = NativeUpdate(load_library()), NativeUpdate(load_library())
    through.past_caches = False
    for shift in (0, 1, 8):
        written = []
        for update in (through, past):
            torch.manual_seed(0)
            n = 40_003
            weight = torch.zeros(n + 9, dtype=weight_dtype)
            update(
                torch.randn(n),
                torch.zeros(n),
                torch.zeros(n),
                torch.randn(n),
                weight[shift : shift + n],
                hyper=Hyper(1e-2, 0.9, 0.999, 1e-8, 0.1),
                step=1,
                scale=1.0,
                threads=2,
            )
            assert not weight[:shift].any()
            assert not weight[shift + n :].any()
            written.append(weight)
        assert torch.equal(*written)


def test_the_plain_pass_is_torchs_adamw() -> None:
    torch.manual_seed(1)
    p = torch.nn.Parameter(torch.randn(1003))
    reference = torch.optim.AdamW([p], lr=1e-2, weight_decay=0.1, fused=True)
    update = PlainUpdate()
    master, m, v, weight = p.detach().clone(), torch.zeros(1003), torch.zeros(1003), torch.empty(1003)
    for step in range(1, 6):
        p.grad = torch.randn(1003)
        update(
            master,
            m,
            v,
            p.grad,
            weight,
            hyper=Hyper(1e-2, 0.9, 0.999, 1e-8, 0.1),
            step=step,
            scale=1.0,
            threads=1,
        )
        reference.step()
    assert torch.equal(master, p)
    assert torch.equal(weight, p)


def test_not_a_number_becomes_a_bf16_nan_and_stays_where_it_is() -> None:
    master, m, v = torch.randn(40), torch.zeros(40), torch.zeros(40)
    grad, weight = torch.randn(40).bfloat16(), torch.empty(40, dtype=torch.bfloat16)
    grad[3], grad[39] = float("nan"), float("inf")
    host_update("native")(
        master, m, v, grad, weight, hyper=Hyper(1e-2, 0.9, 0.999, 1e-8, 0.0), step=1, scale=1.0, threads=2
    )
    assert weight.isnan().nonzero().flatten().tolist() == [3, 39]


def test_without_a_compiler_the_plain_pass_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("FLATPEAK_CACHE", str(tmp_path / "cache"))
    load_library.cache_clear()
    try:
        assert isinstance(host_update("auto"), PlainUpdate)
        with pytest.raises(RuleError, match="needs a C compiler"):
            host_update("native")
    finally:
        load_library.cache_clear()


def test_a_broken_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho no such target >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("FLATPEAK_CACHE", str(tmp_path / "cache"))
    load_library.cache_clear()
    try:
        with pytest.raises(RuleError, match="no such target"):
            host_update("native")
        assert list((tmp_path / "cache").iterdir()) == []
    finally:
        load_library.cache_clear()
