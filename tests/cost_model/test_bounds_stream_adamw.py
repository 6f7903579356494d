"""The optimizer's bytes: the same in both rooms, and the figures known from the paper."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.bounds import stream_adamw as planned
from operators.bounds import stream_adamw as held


@given(
    params=st.integers(0, 10**12),
    bucket_params=st.integers(64, 10**9),
    staging_slots=st.integers(1, 8),
    engine=st.sampled_from(["device", "stream", "host", "split"]),
    host_share=st.floats(0, 1),
    host_bucket_params=st.none() | st.integers(64, 10**9),
)
def test_both_rooms_count_the_same_bytes(
    params: int,
    bucket_params: int,
    staging_slots: int,
    engine: str,
    host_share: float,
    host_bucket_params: int | None,
) -> None:
    shape = {
        "params": params,
        "bucket_params": bucket_params,
        "staging_slots": staging_slots,
        "engine": engine,
        "host_share": host_share,
    }
    assert planned.stream_adamw_terms(**shape) == held.stream_adamw_terms(**shape)  # type: ignore[arg-type]
    coarse = {**shape, "host_bucket_params": host_bucket_params}
    assert planned.host_bytes(**coarse) == held.host_bytes(**coarse)  # type: ignore[arg-type]
    assert planned.staging_bytes(bucket_params, staging_slots) == held.staging_bytes(
        bucket_params, staging_slots
    )


@pytest.mark.parametrize(
    ("bucket_params", "slots", "gib"),
    [(10_000_000, 3, 0.447), (142_076_000, 2, 4.234), (100_000_000, 2, 2.980)],
)
def test_staging_is_the_papers(bucket_params: int, slots: int, gib: float) -> None:
    assert planned.staging_bytes(bucket_params, slots) / 2**30 == pytest.approx(gib, abs=6e-4)


def test_what_each_engine_holds() -> None:
    shape = {"params": 1_600_000_000, "bucket_params": 10_000_000, "staging_slots": 3}
    assert planned.stream_adamw_terms(**shape, engine="stream") == {"optimizer_staging": 480_000_000}
    assert planned.stream_adamw_terms(**shape, engine="host") == {"optimizer_staging": 0}
    assert planned.stream_adamw_terms(**shape, engine="split", host_share=0.35) == {
        "optimizer_staging": 480_000_000
    }
    assert planned.stream_adamw_terms(**shape, engine="device") == {
        "optimizer_staging": 40_000_000,
        "optimizer_state": 19_200_000_000,
    }
    assert planned.host_bytes(**shape, engine="stream") == 19_200_000_000
    assert planned.host_bytes(**shape, engine="host") == 19_200_000_000 + 600_000_000 + 256
    coarse = planned.host_bytes(**shape, engine="split", host_share=0.25, host_bucket_params=50_000_000)
    assert coarse == 19_200_000_000 + 1_200_000_000 + 256
    small = {"params": 1024, "bucket_params": 64, "staging_slots": 3}
    assert planned.host_bytes(**small, engine="host") == 12 * 1024 + 3 * 1024 * 8 + 256
    assert planned.host_bytes(**shape, engine="device") == 0
