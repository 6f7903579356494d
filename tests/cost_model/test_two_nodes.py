"""Rows of a gang over two nodes: the network's share of the bytes, its rates fitted, and no mixing with one node's."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from cost_model.calibration import fit
from cost_model.coverage import coverage
from cost_model.latency import GroupLinks
from cost_model.rates import CostModel, Rate, RateView
from cost_model.rates_default import default_cost_model
from cost_model.sample_formulas import fitted_rates, sample_seconds
from tests.cost_model.clusters import cpu_network

HEAD = {"tokens_per_rank": 512, "hidden": 128, "vocab": 4096, "scalar_bytes": 4, "ring_mode": "weights"}
DISPATCH = {
    "tokens_per_rank": 512,
    "hidden": 128,
    "intermediate": 256,
    "experts": 8,
    "top_k": 2,
    "scalar_bytes": 4,
}


def with_rate(cost: CostModel, name: str, value: float) -> CostModel:
    return cost.with_rates({name: Rate(value, value, value, "measured", cost.rates[name].unit)})


@pytest.mark.parametrize("operator", ["pipelined_llep", "ring_dtp"])
def test_ranks_on_two_nodes_wait_for_the_network(operator: str) -> None:
    values = {**(HEAD if operator == "ring_dtp" else DISPATCH), "ranks": 4}
    slow, fast = (default_cost_model(cpu_network(2, 2, rate)).view() for rate in (1e6, 1e8))
    for one in ({}, {"nodes": 1}):
        assert sample_seconds(slow, operator, {**values, **one}, "forward") == sample_seconds(
            fast, operator, {**values, **one}, "forward"
        )
    spread = {**values, "nodes": 2}
    assert sample_seconds(slow, operator, spread, "forward") > 10 * sample_seconds(
        fast, operator, spread, "forward"
    )


def test_the_network_carries_the_share_of_peers_beyond_the_node() -> None:
    nbytes = 2 * 512 * 128 * 4  # k*N*H*b, of which half leaves a node of two
    one_way = 3e-4 + 0.5 * nbytes / 1e6
    rates = default_cost_model(cpu_network(2, 2, 1e6)).view()
    apart = sample_seconds(rates, "pipelined_llep", {**DISPATCH, "ranks": 4, "nodes": 2}, "forward")
    rates = default_cost_model(cpu_network(2, 2, 1e12)).view()
    free = sample_seconds(rates, "pipelined_llep", {**DISPATCH, "ranks": 4, "nodes": 2}, "forward")
    assert apart - free == pytest.approx(2 * one_way, rel=0.02)


def test_only_links_that_rows_use_are_fitted() -> None:
    view = RateView(default_cost_model(cpu_network(2, 2, 1e8)).rates)
    inside = fitted_rates(view, "ring_dtp", [{"ranks": 4}])
    assert "ring_node_bytes_per_s" in inside
    assert "ring_cluster_bytes_per_s" not in inside
    both = fitted_rates(view, "ring_dtp", [{"ranks": 4, "nodes": 2}])
    assert {"ring_node_bytes_per_s", "ring_cluster_bytes_per_s"} <= set(both)
    apart = fitted_rates(view, "pipelined_llep", [{"ranks": 2, "nodes": 2}])
    assert "all_to_all_cluster_alpha_s" in apart
    assert not any("_node_" in name for name in apart)


def rows(real: CostModel, hardware_id: str) -> pd.DataFrame:
    """Head sweeps over two nodes, as ``real`` would run them."""
    shape = {k: v for k, v in HEAD.items() if k not in ("scalar_bytes", "ring_mode")}
    found: list[dict[str, Any]] = []
    modes, strips, sizes = ("weights", "activations"), (128, 512), (256, 1024, 4096)
    for mode, strip, tokens in itertools.product(modes, strips, sizes):
        told = {**shape, "tokens_per_rank": tokens, "ranks": 2, "nodes": 2}
        config = {"ring_mode": mode, "strip_rows": strip}
        for name in ("forward", "backward"):
            seconds = sample_seconds(real.view(), "ring_dtp", {**HEAD, **told, **config}, name)
            row = {
                "operator": "ring_dtp",
                "provider": "flatpeak",
                "shape_json": json.dumps(told),
                "config_json": json.dumps(config),
                "pass": name,
                "hardware_id": hardware_id,
            }
            found += [{**row, "rank": rank, "repeat": 0, "seconds": seconds} for rank in range(2)]
    return pd.DataFrame(found)


def test_the_network_is_fitted_from_rows_over_it_and_covers_what_spans_nodes() -> None:
    cluster = cpu_network(2, 1, 5e7)
    prior = default_cost_model(cluster)
    real = with_rate(prior, "ring_cluster_bytes_per_s", 1.2e7)
    result = fit(rows(real, cluster.hardware_id), prior, created="2026-01-01T00:00:00Z")
    rate = result.cost_model.rates["ring_cluster_bytes_per_s"]
    assert rate.provenance == "measured"
    assert math.log(rate.value / 1.2e7) == pytest.approx(0.0, abs=0.1)
    inside = result.cost_model.rates["ring_node_bytes_per_s"]
    assert inside == prior.rates["ring_node_bytes_per_s"]
    values = {**HEAD, "ranks": 2, "strip_rows": 128}
    assert coverage(result.cost_model, "ring_dtp", {**values, "nodes": 2}).covered
    assert "nodes=1" in coverage(result.cost_model, "ring_dtp", {**values, "nodes": 1}).message


def test_rows_of_another_network_are_foreign() -> None:
    here, there = cpu_network(2, 1, 5e7), cpu_network(2, 1, 5e7, "ethernet-10g")
    prior = default_cost_model(here)
    result = fit(rows(prior, there.hardware_id), prior)
    assert result.cost_model is prior
    assert result.report.foreign_rows == 2 * 24
    alone = replace(here, nodes=1, tiers=here.tiers[:1])
    assert len({here.hardware_id, there.hardware_id, alone.hardware_id}) == 3


def test_groups_know_how_many_nodes_they_span() -> None:
    cluster = cpu_network(4, 4, 1e8)
    assert [GroupLinks.of(cluster, size).nodes for size in (1, 2, 4, 8, 16)] == [1, 1, 1, 2, 4]
