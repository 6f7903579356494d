"""On CUDA the matmul library's workspace belongs to the bound of what multiplies; recorded peaks lie within it."""

from __future__ import annotations

from collections import Counter

import pytest

from cost_model.reference import load_samples
from tuner.registry import load_adapter
from tuner.replaying.table import tables
from tuner.sweeping.point_bound import bound_terms

HEAD = {"tokens_per_rank": 64, "hidden": 32, "vocab": 256, "dtype": "bfloat16"}
STEP = {"params": 4096, "dtype": "bfloat16", "tensors": 1}


@pytest.mark.parametrize(
    ("operator", "shape", "config", "has"),
    [
        ("ring_dtp", HEAD, {"ring_mode": "weights", "strip_rows": 16}, True),
        ("stream_adamw", STEP, {"engine": "stream", "bucket_params": 64, "staging_slots": 2}, False),
    ],
)
def test_only_what_multiplies_on_cuda_has_the_term(
    operator: str, shape: dict[str, object], config: dict[str, str | int | float], has: bool
) -> None:
    adapter = load_adapter(operator)
    there, here = (
        bound_terms(adapter, dict(shape), dict(config), 2, provider="flatpeak", device=device)
        for device in ("cuda", "cpu")
    )
    assert here == adapter.bound_bytes(dict(shape), dict(config), 2, "flatpeak")
    assert set(there) - set(here) == ({"library_workspace"} if has else set())


def test_peaks_measured_on_h200_lie_within_their_bounds() -> None:
    samples = load_samples()
    ours = samples[(samples["provider"] == "flatpeak") & (samples["operator_version"] > 0)]
    # these optimizer rows were taken on ranks that still held the workspace of the sweep before
    ours = ours[(ours["operator"] != "stream_adamw") & (ours["peak_source"] == "cuda")]
    seen: Counter[str] = Counter()
    for table in tables(ours):
        for point in table.points:
            assert point.peak_bytes is not None
            assert point.bound_bytes is not None
            assert point.peak_bytes <= point.bound_bytes, (table.name, point.config)
            seen[table.operator] += 1
    assert set(seen) == {"pipelined_llep", "ring_dtp", "checkpoint_offload"}
