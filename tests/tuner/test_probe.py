"""Probing this machine: a cluster one can plan with, keyed as its sweeps are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.cluster_file import cluster_to_mapping, read_cluster
from cost_model.errors import RuleError
from tuner.machine.fingerprint import local_hardware_id
from tuner.probing.cluster import ProbeResult, link_fit
from tuner.probing.links import rounds
from tuner.probing.probe import probe_machine
from tuner.probing.rank import active_counts


@pytest.fixture(scope="module")
def probed() -> ProbeResult:
    parts: list[str] = []
    result = probe_machine(ranks=2, device="cpu", progress=parts.append)
    assert any("all-to-all" in part for part in parts)
    return result


def test_a_probe_measures_every_rate_of_this_machine(probed: ProbeResult) -> None:
    cluster = probed.cluster
    assert (cluster.nodes, cluster.gpus_per_node, cluster.gpu.device) == (1, 2, "cpu")
    for figure in (
        cluster.gpu.peak_flops,
        cluster.gpu.hbm_bandwidth_bytes_per_s,
        cluster.host.link_bytes_per_s[0][1],
        cluster.host.cpu_adam_params_per_s,
        cluster.tiers[0].bandwidth_bytes_per_s,
    ):
        assert figure.source == "measured"
        assert 1e5 < figure.value < 1e16
    inside = probed.transfers["node"]
    assert set(inside) == {"all_to_all", "ring", "all_gather"}
    for curve in inside.values():
        assert len(curve) >= 3
        assert all(seconds > 0 for _, seconds in curve)
    assert [(link.tier, link.first, link.second) for link in probed.links] == [("node", "0", "1")]


def test_cards_and_host_share_the_memory_without_counting_a_byte_twice(probed: ProbeResult) -> None:
    cluster = probed.cluster
    cards = cluster.gpu.hbm_bytes.value * cluster.gpus_per_node
    assert cards == pytest.approx(cluster.host.ram_bytes.value)


def test_the_host_link_is_measured_alone_and_shared(probed: ProbeResult) -> None:
    assert [active for active, _ in probed.cluster.host.link_bytes_per_s] == [1, 2]


def test_the_probed_cluster_has_the_fingerprint_of_this_machines_sweeps(probed: ProbeResult) -> None:
    assert probed.cluster.hardware_id == local_hardware_id()
    assert read_cluster(cluster_to_mapping(probed.cluster)) == probed.cluster


@given(st.floats(1e-6, 1e-2), st.floats(1e8, 1e12))
def test_link_fit_recovers_latency_and_bandwidth(alpha: float, bandwidth: float) -> None:
    curve = [(float(n), alpha + n / bandwidth) for n in (2**12, 2**16, 2**20, 2**24, 2**30)]
    latency, rate = link_fit(curve)
    assert latency == pytest.approx(alpha, rel=1e-3)
    assert rate == pytest.approx(bandwidth, rel=1e-3)


def test_link_fit_stays_positive_on_noise() -> None:
    latency, rate = link_fit([(4096.0, 3e-3), (65536.0, 1.6e-3), (2**20, 1.5e-3)])
    assert latency > 0
    assert rate > 0


def test_ranks_of_a_node_copy_in_ever_larger_numbers() -> None:
    assert [active_counts(ranks) for ranks in (1, 2, 3, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8]]


@given(st.integers(2, 40))
def test_in_a_tournament_everybody_meets_everybody_once(count: int) -> None:
    met: list[tuple[int, int]] = []
    for one_round in rounds(count):
        for one, other in enumerate(one_round):
            if other is not None:
                assert one_round[other] == one
                met.append((one, other))
    assert sorted(met) == [(a, b) for a in range(count) for b in range(count) if a != b]


def test_unknown_and_absent_devices_are_refused() -> None:
    with pytest.raises(RuleError, match="a probe runs on"):
        probe_machine(ranks=1, device="tpu")
    with pytest.raises(RuleError, match="evenly"):
        probe_machine(ranks=3, nodes=2, device="cpu")
    with pytest.raises(RuleError, match="every rank of a probe must answer") as refused:
        probe_machine(ranks=2, nodes=2, device="cpu")
    assert "--executor ray" in refused.value.remedy
