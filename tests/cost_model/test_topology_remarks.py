"""What a cluster's wiring means for the groups of a launch."""

from __future__ import annotations

from dataclasses import replace

from cost_model.launch import LaunchConfig
from cost_model.presets import preset
from cost_model.topology import Topology
from cost_model.topology_import import parse_nvidia_smi_topology, with_topology
from cost_model.topology_remarks import topology_remarks
from cost_model.topology_slurm import parse_slurm_topology
from tests.cost_model.topologies import BRIDGED_PAIRS, SLURM_TREE, SWITCHED_PAIR


def _launch(degree: int) -> LaunchConfig:
    return LaunchConfig(
        sequence_degree=1,
        expert_degree=degree,
        vocab_degree=1,
        max_tokens_per_rank=1024,
        accumulation_steps=1,
        chunk_tokens=1024,
        max_chunks=1,
        dispatch_schedule="serial",
        strip_rows=256,
        ring_mode="weights",
        host_budget_bytes=0,
        optimizer_engine="device",
        bucket_params=1,
        staging_slots=1,
    )


def test_a_group_within_the_bridged_pair_and_one_beyond_it() -> None:
    four = replace(preset("hgx-h200"), gpus_per_node=4)
    bridged = with_topology(four, Topology(node=parse_nvidia_smi_topology(BRIDGED_PAIRS)))
    (pairs,) = topology_remarks(bridged, _launch(2))
    # cards 2 and 3 are a contiguous group as well
    assert pairs == "expert_degree: groups of E_p = 2 reach over SYS; NV4 joins 2 cards at most"
    (whole,) = topology_remarks(bridged, _launch(4))
    assert "reach over SYS" in whole
    twins = BRIDGED_PAIRS.replace("PXB\tPXB\t X \tSYS", "PXB\tPXB\t X \tNV4").replace(
        "SYS\tSYS\tSYS\t X ", "SYS\tSYS\tNV4\t X "
    )
    both = with_topology(four, Topology(node=parse_nvidia_smi_topology(twins)))
    (careful,) = topology_remarks(both, _launch(2))
    assert careful.endswith("stay on NV4; the node's rate is that of its slowest link (SYS)")


def test_one_kind_of_link_needs_no_word() -> None:
    two = replace(preset("hgx-h200"), gpus_per_node=2)
    assert (
        topology_remarks(with_topology(two, Topology(parse_nvidia_smi_topology(SWITCHED_PAIR))), _launch(2))
        == []
    )
    assert topology_remarks(two, _launch(2)) == []


def test_a_group_that_no_leaf_holds_is_said_to_cross_switches() -> None:
    fleet = with_topology(preset("hgx-h200", nodes=8), Topology(fabric=parse_slurm_topology(SLURM_TREE)))
    assert topology_remarks(fleet, _launch(8)) == []
    assert topology_remarks(fleet, _launch(16)) == []
    (crossing,) = topology_remarks(fleet, _launch(64))
    assert crossing == (
        "expert_degree: groups of E_p = 64 span 8 nodes, a leaf has as few as 3: "
        "they cross switches 2 levels above the leaves"
    )
    (beyond,) = topology_remarks(replace(fleet, nodes=16), _launch(128))
    assert "need 16 nodes; the largest switches named have 11 below them" in beyond


def test_notes_of_a_probe_are_passed_on() -> None:
    noted = replace(preset("hgx-h200"), notes=("node b: slow",))
    assert topology_remarks(noted, _launch(8)) == ["node b: slow"]
