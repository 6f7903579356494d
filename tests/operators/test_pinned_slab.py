"""PinnedSlab: exact size, alignment, lifetime, and errors that name host memory."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from operators.errors import RuleError
from operators.pinned_slab import PAGE_BYTES, PinnedSlab, available_host_bytes, page_rounded


def test_size_is_exact_to_the_page_and_not_a_power_of_two() -> None:
    wanted = 2**20 + 1
    with PinnedSlab(wanted) as slab:
        assert slab.locked_bytes == page_rounded(wanted) == 2**20 + PAGE_BYTES
        assert slab.buffer.shape == (slab.locked_bytes,)
        assert slab.buffer.dtype == torch.uint8
        assert slab.buffer.data_ptr() % PAGE_BYTES == 0
    assert slab.locked_bytes == 0


@given(st.lists(st.tuples(st.integers(0, 3000), st.sampled_from([1, 16, 256, 4096])), max_size=8))
def test_parts_are_aligned_disjoint_and_inside(parts: list[tuple[int, int]]) -> None:
    total = sum(n + align for n, align in parts)
    with PinnedSlab(total) as slab:
        end = slab.buffer.data_ptr()
        for n, align in parts:
            view = slab.take(n, align)
            if n:
                assert view.data_ptr() % align == 0
                assert view.data_ptr() >= end
                end = view.data_ptr() + n
            assert view.numel() == n
        assert end <= slab.buffer.data_ptr() + slab.nbytes
        assert slab.free_bytes >= 0


def test_views_outlive_the_slab() -> None:
    slab = PinnedSlab(PAGE_BYTES)
    view = slab.take(16).view(torch.float32)
    view.fill_(3.0)
    slab.close()
    del slab
    gc.collect()
    assert view.tolist() == [3.0] * 4


def test_close_twice_and_use_after_close() -> None:
    slab = PinnedSlab(10)
    slab.close()
    slab.close()
    assert slab.closed
    assert slab.free_bytes == 0
    with pytest.raises(RuleError, match="closed slab"):
        slab.take(1)


def test_empty_slab_holds_nothing() -> None:
    with PinnedSlab(0) as slab:
        assert slab.locked_bytes == 0
        assert slab.take(0).numel() == 0


def test_too_much_is_refused_naming_host_memory() -> None:
    with pytest.raises(RuleError, match="host memory") as caught:
        PinnedSlab(2**50)
    assert caught.value.value == 2**50
    assert "not GPU memory" in caught.value.remedy


@pytest.mark.parametrize(("nbytes", "align"), [(PAGE_BYTES + 1, 256), (-1, 256), (8, 3), (8, 2 * PAGE_BYTES)])
def test_take_refuses_what_it_cannot_hold(nbytes: int, align: int) -> None:
    with PinnedSlab(PAGE_BYTES) as slab, pytest.raises(RuleError):
        slab.take(nbytes, align)


def test_wrong_sizes_and_pinning_without_cuda_are_refused() -> None:
    with pytest.raises(RuleError):
        PinnedSlab(-1)
    if not torch.cuda.is_available():
        with pytest.raises(RuleError, match="CUDA"):
            PinnedSlab(1, pin=True)


def test_available_bytes_is_a_sane_figure() -> None:
    available = available_host_bytes()
    if Path("/proc/meminfo").exists():
        assert available is not None
        assert 0 <= available < 2**50
