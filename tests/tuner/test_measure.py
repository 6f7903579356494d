"""Measuring: two modes told apart, repeats aligned, peaks per pass, what was held between trials forgotten."""

from __future__ import annotations

import gc
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cost_model.errors import RuleError
from cost_model.samples import split_modes as fitted_modes
from operators.ranks import LoopbackRanks, Ranks
from tests.gang import gang
from tests.tuner import chaos_adapter, toy
from tests.tuner.rank_tasks import measure_quietly
from tuner.machine.fingerprint import (
    bare_cluster,
    local_hardware,
    local_hardware_id,
    local_software,
    software_id,
)
from tuner.measuring.measure import MeasureRequest, measure_rank
from tuner.measuring.modes import split_modes


def test_one_mode_is_not_cut() -> None:
    modes = split_modes([1.0, 1.05, 0.97, 1.02])
    assert (modes.fast_s, modes.slow_s, modes.slow_share) == (1.01, None, 0.0)


def test_a_slow_mode_is_reported_with_its_share_and_not_averaged() -> None:
    modes = split_modes([1.0, 1.3, 1.02, 1.32, 1.01])
    assert (modes.fast_s, modes.slow_s, modes.slow_share) == (1.01, 1.31, 0.4)


def test_the_widest_gap_is_the_cut() -> None:
    assert split_modes([1.0, 1.2, 3.0]).slow_s == 3.0
    assert split_modes([2.0]).fast_s == 2.0


def test_repeats_that_scatter_evenly_are_one_mode_and_so_are_two_repeats() -> None:
    assert (split_modes([1.0, 1.13, 1.27, 1.43]).fast_s, split_modes([1.0, 1.13, 1.27, 1.43]).slow_s) == (
        1.2,
        None,
    )
    assert split_modes([1.0, 1.3]).slow_s is None


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=9))
def test_modes_are_those_that_the_cost_model_fits_to(seconds: list[float]) -> None:
    fast, slow = fitted_modes(seconds)
    modes = split_modes(seconds)
    assert modes.fast_s == median(fast)
    assert (modes.slow_s is None, modes.slow_share) == (not slow, len(slow) / len(seconds))


@pytest.mark.parametrize("seconds", [[], [0.0, 1.0]])
def test_nothing_to_tell_apart_is_refused(seconds: list[float]) -> None:
    with pytest.raises(RuleError, match="positive time"):
        split_modes(seconds)


def _with_reports(ranks: Ranks, payload: dict[str, Any]) -> list[dict[str, Any]]:
    heard: list[dict[str, Any]] = []
    measure_rank(ranks, payload, heard.append)
    return heard


def test_rows_of_every_repeat_and_progress_of_each(tmp_path: Path) -> None:
    shape = {"log": str(tmp_path / "log"), "pause_ms": 1}
    request = MeasureRequest(toy.NAME, "flatpeak", shape, {"n": 2, "act": "ok"}, repeats=4)
    answers = gang(2).run(measure_quietly, request.payload())
    for one in answers:
        assert [row[:2] for row in one["samples"]] == [["forward", i] for i in range(4)]
        assert one["base_bytes"] == 2 * toy.MIB
        assert all(row[3] >= 2 * toy.MIB and row[4] is None for row in one["samples"])
        assert one["peak_source"] == "tracked"
        assert one["warmups"] >= 2
    # all ranks agree on when it was steady
    assert len({one["warmups"] for one in answers}) == 1
    heard = gang(2).run(_with_reports, request.payload())[0]
    assert [h["repeat"] for h in heard if h["phase"] == "repeat"] == [1, 2, 3, 4]
    assert {"check", "build", "warm-up", "peak", "repeat"} == {h["phase"] for h in heard}


def _live_after(ranks: Ranks, payload: dict[str, Any]) -> int:
    measure_rank(ranks, payload, lambda progress: None)
    gc.collect()
    return sum(isinstance(o, torch.Tensor) and o.nbytes >= toy.MIB for o in gc.get_objects())


def test_a_warm_rank_keeps_nothing_of_the_last_trial(tmp_path: Path) -> None:
    shape = {"log": str(tmp_path / "log"), "pause_ms": 1}
    request = MeasureRequest(toy.NAME, "flatpeak", shape, {"n": 2, "act": "ok"})
    assert gang(2).run(_live_after, request.payload()) == [0, 0]


def test_hardware_is_keyed_by_every_part_of_it() -> None:
    here = local_hardware("cpu")
    assert bare_cluster(here).hardware_id == local_hardware_id("cpu")
    for part, other in (
        ("sm_count", 999),
        ("link_graph", "NV18"),
        ("cpu_name", "another"),
        ("gpu_name", "B200"),
    ):
        assert bare_cluster({**here, part: other}).hardware_id != bare_cluster(here).hardware_id


def test_software_is_named_and_hashed() -> None:
    software = local_software()
    assert software["torch"] == torch.__version__
    assert software["commit"]
    assert software_id(software) != software_id({**software, "torch": "1.0"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="holds where there is no card")
def test_a_device_that_ran_out_of_memory_keeps_its_reason_where_no_card_can_be_asked(tmp_path: Path) -> None:
    request = MeasureRequest(
        adapter=chaos_adapter.NAME,
        provider="flatpeak",
        shape={"log": str(tmp_path / "log"), "pause_ms": 1},
        config={"point": chaos_adapter.FILLS_DEVICE, "round": 0},
    )
    with pytest.raises(torch.OutOfMemoryError, match=r"80\.00 GiB"):
        measure_rank(LoopbackRanks(2, rank=1), request.payload(), lambda progress: None)
