"""Probing several nodes: both tiers, every pair, and the node that is slower than its like."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.cluster_file import cluster_to_mapping, read_cluster
from cost_model.topology import Fabric, Switch
from operators.ranks import Ranks
from tests.cost_model.topologies import BRIDGED_PAIRS, NCCL_BRIDGED, NCCL_SWITCHED_PAIR, SWITCHED_PAIR
from tests.gang import gang
from tests.ray_cluster import cluster
from tuner.executors.ray import RayExecutor
from tuner.machine.fingerprint import local_hardware, local_hardware_id
from tuner.probing.cluster import probe_result
from tuner.probing.links import Pair
from tuner.probing.nodes import LinkFigures, NodeFigures, names_of, slow_links, slow_nodes
from tuner.probing.probe import probe_machine
from tuner.probing.rank import RankFigures, measure_rank
from tuner.probing.wiring import Wiring, node_wiring


def _figures(ranks: Ranks, **options: Any) -> dict[str, Any]:
    return asdict(measure_rank(ranks, "cpu", sizes=(2**12, 2**14, 2**16), **options))


def test_every_rank_measures_both_tiers_and_meets_every_peer_once() -> None:
    answers = gang(4).run(_figures, nodes=2)
    for rank, one in enumerate(answers):
        assert set(one["curves"]) == {"node", "cluster"}
        for collectives in one["curves"].values():
            assert [nbytes for nbytes, _ in collectives["all_gather"]] == [2**12, 2**14, 2**16]
        node, place = divmod(rank, 2)
        assert [pair["peer"] for pair in one["card_pairs"]] == [2 * node + 1 - place]
        assert [pair["peer"] for pair in one["node_pairs"]] == [2 * (1 - node) + place]
        assert set(one["host_link"]) == ({1, 2} if place == 0 else {2})
        assert one["complete"]
        assert (one["wiring"] is not None) == (place == 0)


def test_without_time_left_the_rest_is_left_out_and_said() -> None:
    answers = gang(2).run(_figures, limit_s=0.0)
    for one in answers:
        # what a cluster file needs is measured all the same
        assert len(one["curves"]["node"]["all_to_all"]) == 3
        assert one["card_pairs"] == []
        assert not one["complete"]
    result = probe_result([one | {"kind": "k"} for one in answers], nodes=1, device="cpu")
    assert any("the time ran out" in warning for warning in result.warnings)


def test_a_probe_of_a_ray_cluster_measures_the_network_under_the_fleets_fingerprint() -> None:
    executor = RayExecutor(cluster().address)
    heard: list[str] = []
    try:
        probed = probe_machine(ranks=4, nodes=2, device="cpu", executor=executor, progress=heard.append)
        site = executor.site("cpu", 2)
    finally:
        executor.close()
    assert (probed.cluster.nodes, probed.cluster.gpus_per_node) == (2, 2)
    assert [tier.scope for tier in probed.cluster.tiers] == ["node", "cluster"]
    assert probed.cluster.hardware_id == site.hardware_id
    assert all(tier.bandwidth_bytes_per_s.source == "measured" for tier in probed.cluster.tiers)
    assert [link.tier for link in probed.links] == ["node", "node", "cluster"]
    assert len({node.name for node in probed.nodes}) == 2
    assert {node.kind for node in probed.nodes} == {local_hardware_id("cpu")}
    assert any("pairs of nodes" in part for part in heard)
    assert read_cluster(cluster_to_mapping(probed.cluster)) == probed.cluster


# -- what is made of the answers -----------------------------------------------------------------------


def _node_seen(host: str) -> dict[str, Any]:
    """A quiet node but for ``c``, where others use half of the cores."""
    names = ("cpu_clock_hz", "cpu_governor", "load_1m")
    lists = ("cards_before", "cards_after", "processes", "family")
    return {
        **dict.fromkeys(names),
        **{name: [] for name in lists},
        "host": host,
        "seconds": 10.0,
        "cores": 8,
        "busy_core_s": 45.0 if host == "c" else 1.0,
        "after_own_work": False,
    }


def _answer(
    host: str, peers: list[int], *, speed: float = 1.0, wiring: Wiring | None = None
) -> dict[str, Any]:
    curve = [(2**12, 1e-4), (2**20, 2e-4), (2**26, 1e-2)]
    collectives = {name: list(curve) for name in ("all_to_all", "ring", "all_gather")}
    figures = RankFigures(
        host=host,
        hardware=local_hardware("cpu"),
        gemm_flops=1e12 * speed,
        memory_bytes_per_s=1e10,
        curves={"node": collectives, "cluster": collectives},
        host_link={1: 5e9, 2: 3e9},
        adam_params_per_s=1e8,
        card_pairs=[],
        node_pairs=[Pair(peer, 1e-5, 1e9 * speed, 0.01) for peer in peers],
        watch={"pid": 1, "card": None, "cpu_s": 1.0, "device_reserved_bytes": None, "node": _node_seen(host)},
        spread=dict.fromkeys(("gemm_flops", "memory_bytes_per_s", "host_link", "adam_params_per_s"), 0.02),
        wiring=wiring,
    )
    return asdict(figures) | {"kind": "kind"}


def test_a_slow_node_shows_and_the_cluster_takes_the_slowest() -> None:
    peers = {host: [2 * n for n in range(4) if n != index] for index, host in enumerate("abcd")}
    answers = [
        _answer(host, [peer + place for peer in peers[host]], speed=0.6 if host == "c" else 1.0)
        for host in "abcd"
        for place in range(2)
    ]
    fabric = Fabric((Switch("l1", ("a", "b"), "s"), Switch("l2", ("c", "d"), "s"), Switch("s")))
    result = probe_result(answers, nodes=4, device="cpu", network="ethernet-10g", fabric=fabric)
    assert [(one.what, one.figure) for one in result.slow if one.what.startswith("node")] == [
        ("node c", "gemm_flops"),
        ("node c", "network_bytes_per_s"),
    ]
    assert result.cluster.gpu.peak_flops.value == pytest.approx(0.6e12)
    # of two ranks' all-to-all half travels
    assert result.nodes[0].rates["node_link_bytes_per_s"] == pytest.approx(2**25 / 1e-2)
    assert result.cluster.tiers[1].name == "ethernet-10g"
    assert any(note.startswith("node c: matrix rate 40 % below its like") for note in result.cluster.notes)
    assert all(note.endswith("the slowest counts") for note in result.cluster.notes)
    assert "c: others used 55 % of its 8 cores; its figures are in doubt" in result.warnings
    across = {(link.first, link.second): link.levels for link in result.links}
    assert len(across) == 6
    assert (across["a", "b"], across["b", "c"]) == (0, 1)
    assert result.cluster.topology is not None
    assert read_cluster(cluster_to_mapping(result.cluster)) == result.cluster


def test_nodes_that_are_joined_otherwise_are_named() -> None:
    four = [
        _answer(host, [], wiring=wiring if place == 0 else None)
        for host, wiring in (
            ("a", Wiring(nvidia_smi=BRIDGED_PAIRS)),
            ("b", Wiring(BRIDGED_PAIRS.replace("NV4", "NV2"))),
        )
        for place in range(4)
    ]
    for one in four:
        one["host_link"][4] = 1e9
    result = probe_result(four, nodes=2, device="cpu", network="x")
    assert result.cluster.topology is not None
    assert result.cluster.topology.node is not None
    assert result.cluster.topology.node.link_kind(0, 1) == "NV4"
    assert "node b: its cards are joined otherwise than those of a" in result.warnings


def test_wiring_is_kept_only_where_it_is_of_these_cards() -> None:
    both, notes = node_wiring(Wiring(SWITCHED_PAIR, NCCL_SWITCHED_PAIR), 2)
    assert both is not None
    assert notes == []
    assert [nic.name for nic in both.nics] == ["mlx5_0", "eth0"]
    part, notes = node_wiring(Wiring(BRIDGED_PAIRS, NCCL_SWITCHED_PAIR), 2)
    assert part is not None
    assert [note.split(" shows ")[1] for note in notes] == [
        "4 cards, the ranks had 2: its links are not kept"
    ]
    nothing, notes = node_wiring(Wiring("No devices were found", "<system>"), 2)
    assert nothing is None
    assert len(notes) == 2
    clash, notes = node_wiring(Wiring(BRIDGED_PAIRS.replace("NV4", "SYS"), NCCL_BRIDGED), 4)
    assert clash is not None
    assert clash.link_kind(0, 1) == "SYS"
    assert len(notes) == 1
    assert "the same node" in notes[0]


# -- comparisons ---------------------------------------------------------------------------------------


def _node(name: str, rate: float, kind: str = "h200", spread: float = 0.01) -> NodeFigures:
    return NodeFigures(name, kind, {"gemm_flops": rate}, {"gemm_flops": spread})


@given(st.integers(2, 12), st.data())
def test_exactly_the_node_that_lags_is_named(count: int, data: st.DataObject) -> None:
    lag = data.draw(st.integers(0, count - 1))
    rates = [data.draw(st.floats(0.97, 1.03)) for _ in range(count)]
    slow = data.draw(st.floats(0.3, 0.8))
    nodes = [_node(f"n{i}", rate * (slow if i == lag else 1.0)) for i, rate in enumerate(rates)]
    assert [one.what for one in slow_nodes(nodes)] == [f"node n{lag}"]


def test_nodes_of_different_kinds_are_not_compared_and_spread_is_forgiven() -> None:
    assert slow_nodes([_node("a", 1.0), _node("b", 0.3, "h100")]) == []
    assert slow_nodes([_node("a", 1.0, spread=0.2), _node("b", 0.75, spread=0.2)]) == []
    (only,) = slow_nodes([_node("a", 1.0, spread=0.9), _node("b", 0.5, spread=0.9)])
    assert only.what == "node b"
    assert slow_nodes([_node("a", 1.0)]) == []


def test_a_slow_link_is_named_among_its_like_only() -> None:
    far = [LinkFigures("cluster", "a", str(i), 1e-5, 1e9, levels=1) for i in range(3)]
    near = [LinkFigures("cluster", "b", str(i), 1e-5, 4e9, levels=0) for i in range(3)]
    assert slow_links([*far, *near]) == []
    (one,) = slow_links([*far, *near, replace(near[0], bytes_per_s=2e9, second="9")])
    assert one.what == "link b – 9"
    assert one.below == pytest.approx(0.5)
    assert slow_links([far[0], replace(far[0], bytes_per_s=1e3)]) == []


def test_nodes_of_one_host_are_numbered() -> None:
    assert names_of(["a", "b", "a"]) == ["a/0", "b", "a/1"]
