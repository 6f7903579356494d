"""Calibration: known constants come back inside their intervals, and what was not measured is said."""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest

from cost_model.calibration import FitResult, OutsideMeasured, conformal_spread, fit, predict
from cost_model.errors import RuleError
from cost_model.rates import CostModel, Rate
from cost_model.rates_default import default_cost_model
from cost_model.sample_formulas import FITTED
from cost_model.samples import observations, split_modes
from tests.cost_model.clusters import cpu_cluster, gpu_cluster
from tests.cost_model.sweep_rows import RANKS, rows, seconds_of

PRIOR = default_cost_model(cpu_cluster())
CREATED = "2026-01-01T00:00:00Z"


def truth(seed: int, width: float = 0.5) -> CostModel:
    """Constants drawn around the prior, as wide as a probe may be off."""
    generator = np.random.default_rng(seed)
    names = sorted({name for group in FITTED.values() for name in group} | {"host_link_4_bytes_per_s"})
    moved: dict[str, Rate] = {}
    for name in names:
        rate = PRIOR.rates[name]
        value = rate.value * math.exp(width / 1.645 * float(generator.standard_normal()))
        if rate.unit == "share":
            value = min(value, 0.99)
        moved[name] = Rate(value, value, value, "measured", rate.unit)
    return PRIOR.with_rates(moved)


def fitted(operator: str, seed: int = 1, **options: Any) -> tuple[CostModel, FitResult]:
    real = truth(seed)
    return real, fit(rows(real, operator, seed=seed, **options), PRIOR, created=CREATED)


@pytest.mark.parametrize("operator", sorted(FITTED))
def test_an_operator_is_fitted_and_promoted(operator: str) -> None:
    real, result = fitted(operator)
    (report,) = result.report.operators
    assert report.operator == operator
    assert report.promoted
    assert report.median_error < 0.05 < report.prior_error
    model = result.cost_model
    assert (model.version, model.parent_id, model.hardware_id) == (2, PRIOR.id, PRIOR.hardware_id)
    assert model.id != PRIOR.id
    assert model.coverage[operator]
    assert CostModel.from_json(json.loads(json.dumps(model.to_json()))) == model
    assert real.id != model.id


def test_known_constants_come_back_within_their_intervals() -> None:
    inside = total = 0
    for seed in range(4):
        for operator in ("pipelined_llep", "ring_dtp", "stream_adamw"):
            real, result = fitted(operator, seed)
            for name in FITTED[operator]:
                rate = result.cost_model.rates[name]
                total += 1
                inside += rate.low <= real.rates[name].value <= rate.high
    # The intervals claim 90 %.
    assert inside / total > 0.8


def test_what_the_rows_determine_becomes_sharp() -> None:
    real, result = fitted("ring_dtp", 2)
    rate = result.cost_model.rates["dense_flops"]
    assert rate.provenance == "measured"
    assert rate.value == pytest.approx(real.rates["dense_flops"].value, rel=0.1)
    assert rate.high / rate.low < 1.3
    untouched = result.cost_model.rates["attention_flops"]
    assert untouched == PRIOR.rates["attention_flops"]


def test_intervals_cover_fresh_rows() -> None:
    covered = total = 0
    for seed in range(3):
        real, result = fitted("pipelined_llep", seed)
        generator = np.random.default_rng(100 + seed)
        shape = {
            "tokens_per_rank": 3000,
            "hidden": 256,
            "intermediate": 512,
            "experts": 16,
            "top_k": 4,
            "dtype": "float32",
        }
        for chunks in (1, 2, 3, 5, 6, 8):
            for name in ("forward", "backward"):
                config = {"chunks": chunks, "dispatch_schedule": "serial"}
                measured = seconds_of(real, "pipelined_llep", shape, config, name)
                measured *= math.exp(0.02 * float(generator.standard_normal()))
                values = {**shape, **config, "ranks": RANKS, "scalar_bytes": 4}
                estimate = predict(result.cost_model, "pipelined_llep", values, name)
                assert estimate.provenance == "interpolated"
                total += 1
                covered += estimate.low <= measured <= estimate.high
    assert covered / total > 0.85


def test_outside_what_was_measured_is_wide_warned_of_and_refused_when_strict() -> None:
    _, result = fitted("pipelined_llep")
    model = result.cost_model
    shape = {"hidden": 256, "intermediate": 512, "experts": 16, "top_k": 4, "chunks": 4, "ranks": RANKS}
    inside = {**shape, "tokens_per_rank": 4096, "scalar_bytes": 4}
    outside = {**inside, "tokens_per_rank": 131072}
    near = predict(model, "pipelined_llep", inside, "forward")
    with pytest.warns(OutsideMeasured, match="tokens_per_rank=131072"):
        far = predict(model, "pipelined_llep", outside, "forward")
    assert far.provenance == "transferred"
    assert far.high / far.low > 3 * near.high / near.low
    with pytest.raises(RuleError, match="Sweep it at these values"):
        predict(model, "pipelined_llep", outside, "forward", strict=True)
    absurd = {**outside, "hidden": 65536, "intermediate": 65536}
    with pytest.raises(RuleError, match="Sweep it"):
        predict(model, "pipelined_llep", absurd, "forward")


def test_rows_of_other_hardware_are_a_miss_and_said_so() -> None:
    # Same card name, another number of SMs.
    first, second = gpu_cluster(), gpu_cluster(sm_count=114)
    assert first.gpu.name == second.gpu.name
    assert first.hardware_id != second.hardware_id
    table = rows(truth(1), "ring_dtp", hardware_id=second.hardware_id)
    result = fit(table, default_cost_model(first), created=CREATED)
    assert result.cost_model == default_cost_model(first)
    assert result.report.foreign_rows == len(table)
    assert "other hardware" in result.report.messages[0]


def test_a_refit_that_is_no_better_on_held_out_rows_is_not_promoted() -> None:
    real = truth(3)
    perfect = PRIOR.with_rates(real.rates)
    result = fit(rows(real, "ring_dtp", noise=0.0), perfect, created=CREATED)
    (report,) = result.report.operators
    assert not report.promoted
    assert result.cost_model == perfect
    assert "stays" in report.message


def test_too_few_configurations_fit_nothing() -> None:
    table = rows(truth(1), "ring_dtp")
    few = table[table["config_json"].isin(sorted(table["config_json"].unique())[:2])]
    result = fit(few, PRIOR, created=CREATED)
    assert result.cost_model == PRIOR
    # Two knob settings of two shapes.
    assert "4 configurations are too few" in result.report.operators[0].message


def test_both_latency_modes_are_kept_apart() -> None:
    assert split_modes([1.0, 1.01, 1.02, 1.3, 1.31]) == ([1.0, 1.01, 1.02], [1.3, 1.31])
    assert split_modes([1.0, 1.1, 1.2, 1.3]) == ([1.0, 1.1, 1.2, 1.3], [])
    assert split_modes([2.0, 1.0]) == ([1.0, 2.0], [])
    table = rows(truth(1), "ring_dtp", noise=0.001, repeats=5)
    slow = table["repeat"] == 4
    table.loc[slow, "seconds"] = table.loc[slow, "seconds"] * 1.4
    found, _ = observations(table, PRIOR.hardware_id)
    assert all(row.slow_share == pytest.approx(0.2) for row in found)
    assert all(row.slow_seconds is not None and row.slow_seconds > 1.3 * row.seconds for row in found)
    result = fit(table, PRIOR, created=CREATED)
    assert len(result.report.operators[0].bimodal) == len(found)
    assert result.report.operators[0].median_error < 0.05


def test_a_configuration_is_as_slow_as_its_slowest_rank() -> None:
    table = rows(truth(1), "stream_adamw", noise=0.0)
    table.loc[table["rank"] == 2, "seconds"] *= 3.0
    plain, _ = observations(rows(truth(1), "stream_adamw", noise=0.0), PRIOR.hardware_id)
    found, _ = observations(table, PRIOR.hardware_id)
    for before, after in zip(plain, found, strict=True):
        assert after.seconds == pytest.approx(3.0 * 0.98 * before.seconds)


def test_baselines_are_not_taken_for_our_own() -> None:
    table = rows(truth(1), "ring_dtp")
    table["provider"] = "materialised"
    found, foreign = observations(table, PRIOR.hardware_id)
    assert (found, foreign) == ([], 0)


def test_a_missing_column_is_named() -> None:
    with pytest.raises(RuleError, match="hardware_id"):
        fit(pd.DataFrame({"operator": []}), PRIOR)


def test_fit_of_nothing_is_the_prior() -> None:
    empty = rows(truth(1), "ring_dtp").iloc[:0]
    assert fit(empty, PRIOR).cost_model == PRIOR


def test_transferred_rates_are_scaled_widened_and_marked() -> None:
    facts = {"peak_flops": 4e10, "hbm_bytes_per_s": 8e9}
    moved = PRIOR.transferred_to("another", facts)
    for name, rate in moved.rates.items():
        assert rate.provenance in ("transferred", "analytic")
        if rate.unit != "share":
            assert rate.high / rate.low > 3.9 * PRIOR.rates[name].high / PRIOR.rates[name].low
    assert moved.rates["dense_flops"].value == pytest.approx(2 * PRIOR.rates["dense_flops"].value)
    assert (moved.coverage, moved.spreads, moved.parent_id) == ({}, {}, PRIOR.id)


def test_other_software_widens_and_is_noted() -> None:
    measured = fit(rows(truth(1), "ring_dtp"), PRIOR, created=CREATED, software="torch 2.13").cost_model
    assert measured.under_software("torch 2.13") is measured
    other = measured.under_software("torch 2.11")
    before, after = measured.rates["dense_flops"], other.rates["dense_flops"]
    assert after.high / after.low > before.high / before.low
    assert "torch 2.13" in after.note


def test_conformal_spread_is_the_order_statistic() -> None:
    errors = np.arange(1, 20, dtype=float)
    assert conformal_spread(errors) == 18.0
    assert conformal_spread(np.array([1.0, 2.0])) == 2.5


def test_prediction_of_a_datasheet_model_warns_of_nothing() -> None:
    values = {
        "params": 1_000_000,
        "bucket_params": 100_000,
        "staging_slots": 2,
        "ranks": 4,
        "scalar_bytes": 4,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert predict(PRIOR, "stream_adamw", values, "step").provenance == "analytic"


STRANGE: dict[str, dict[str, object]] = {
    "ranks=0": {"ranks": 0},
    "nodes=0": {"nodes": 0},
    "nodes=-2": {"nodes": -2},
    "nodes=None": {"nodes": None},
    "ranks=4 over nodes=8": {"nodes": 8},
    "ranks=4 over nodes=3": {"nodes": 3},
    "vocab=None": {"vocab": None},
    "tokens_per_rank=0": {"tokens_per_rank": 0},
    "hidden=nan": {"hidden": math.nan},
    "strip_rows=-1": {"strip_rows": -1},
}


@pytest.mark.parametrize("rule", STRANGE)
def test_rows_that_no_group_can_have_taken_are_left_out_and_counted(rule: str) -> None:
    table = rows(truth(1), "ring_dtp")
    odd = table[table["config_json"] == table["config_json"].iloc[0]].copy()
    column = "config_json" if "strip_rows" in STRANGE[rule] else "shape_json"
    odd[column] = [json.dumps({**json.loads(text), **STRANGE[rule]}) for text in odd[column]]
    result = fit(pd.concat([table, odd], ignore_index=True), PRIOR)
    assert result.report.promoted
    assert result.report.operators == fit(table, PRIOR).report.operators
    (message,) = result.report.messages
    assert message == f"{len(odd)} rows that no group can have taken were left out (ring_dtp with {rule})."


def test_a_shape_that_is_no_object_is_one_row_less() -> None:
    table = rows(truth(1), "ring_dtp")
    odd = table.head(2).assign(shape_json=["[1]", "not JSON"])
    result = fit(pd.concat([table, odd], ignore_index=True), PRIOR)
    assert result.report.promoted
    assert result.report.messages[0].startswith("2 rows that no group can have taken")
