"""Topologies from other tools' files: what they say is read, what is broken is refused with its line."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.cluster_file import cluster_to_mapping, read_cluster
from cost_model.errors import RuleError
from cost_model.presets import preset
from cost_model.topology import MAX_HOSTS, Nic, NodeTopology, Topology
from cost_model.topology_import import merge_node, parse_nvidia_smi_topology, read_topology, with_topology
from cost_model.topology_nccl import parse_nccl_topology
from cost_model.topology_slurm import expand_hosts, parse_slurm_topology
from tests.cost_model.topologies import (
    BRIDGED_PAIRS,
    NCCL_BRIDGED,
    NCCL_SWITCHED_PAIR,
    SLURM_BLOCKS,
    SLURM_TREE,
    SWITCHED_PAIR,
)

# -- nvidia-smi topo -m --------------------------------------------------------------------------------


def test_a_matrix_gives_links_numa_nodes_and_nearest_network_cards() -> None:
    node = parse_nvidia_smi_topology(BRIDGED_PAIRS)
    assert node.cards == 4
    assert node.link_kind(0, 1) == "NV4"
    assert node.link_kind(2, 3) == "SYS"
    assert node.kinds == {"NV4": 1, "PXB": 2, "SYS": 3}
    assert node.islands == ((0, 1), (2,), (3,))
    assert node.numa == (0, 0, None, 2)
    assert node.nics == (Nic("mlx5_0", None, (0,)), Nic("mlx5_1", None, (3,)))


def test_a_matrix_pasted_with_blanks_reads_the_same() -> None:
    node = parse_nvidia_smi_topology(SWITCHED_PAIR)
    assert node.links == (("X", "NV18"), ("NV18", "X"))
    assert node.numa == (0, 0)
    assert node.islands == ((0, 1),)


def test_the_old_name_of_the_link_between_sockets_is_known() -> None:
    node = parse_nvidia_smi_topology(" GPU0 GPU1 CPU Affinity\nGPU0 X SOC 0-7\nGPU1 SOC X 8-15\n")
    assert node.links[0] == ("X", "SYS")


@pytest.mark.parametrize(
    ("text", "rule", "line"),
    [
        ("", "prints a head", "line 0"),
        ("NVIDIA-SMI has failed\n", "prints a head", "line 1"),
        (BRIDGED_PAIRS.replace("GPU3\tSYS", "gpu3\tSYS"), "a row for every card", "no row of GPU3"),
        (
            SWITCHED_PAIR.replace("GPU0     X      NV18    0-47            0               N/A", "GPU0 X"),
            "a cell for every",
            "line 2",
        ),
        (SWITCHED_PAIR.replace("GPU1    NV18     X", "GPU1    NV12     X"), "both ways", "line 3"),
        (SWITCHED_PAIR.replace("GPU1    NV18     X", "GPU1    WAT      X"), "a cell is X", "line 3"),
        (SWITCHED_PAIR.replace("GPU1    NV18     X", "GPU1    X        X"), "a cell is X", "line 3"),
        (SWITCHED_PAIR + "GPU1    NV18     X      0-47   0  N/A\n", "one row", "line 4"),
        (SWITCHED_PAIR.replace("GPU0    GPU1 ", "GPU0    GPU0 ", 1), "devices once", "line 1"),
    ],
)
def test_a_broken_matrix_is_refused_with_its_line(text: str, rule: str, line: str) -> None:
    with pytest.raises(RuleError, match=rule) as refused:
        parse_nvidia_smi_topology(text)
    assert line in str(refused.value.value)


# -- NCCL ----------------------------------------------------------------------------------------------


def test_a_dump_gives_links_over_switches_and_rates_of_network_cards() -> None:
    node = parse_nccl_topology(NCCL_SWITCHED_PAIR)
    assert node.links == (("X", "NV18"), ("NV18", "X"))
    assert node.numa == (0, 0)
    assert node.nics == (Nic("mlx5_0", 50e9, (0,)), Nic("eth0", 1.25e9, (0, 1)))


def test_a_dump_gives_direct_links_and_paths_over_pcie() -> None:
    node = parse_nccl_topology(NCCL_BRIDGED)
    assert node.link_kind(0, 1) == "NV4"
    assert node.link_kind(0, 2) == node.link_kind(2, 1) == "PXB"
    assert node.link_kind(0, 3) == "SYS"
    assert node.numa == (0, 0, 0, 1)
    without = parse_nccl_topology(NCCL_BRIDGED.replace("nvlink", "other"))
    assert without.link_kind(0, 1) == "PIX"


def test_cards_of_another_host_in_a_dump_are_left_out() -> None:
    other = NCCL_SWITCHED_PAIR.split("\n", 1)[1].replace("0x5f3a", "0x77").replace("</system>\n", "")
    both = NCCL_SWITCHED_PAIR.replace("</system>\n", other + "</system>\n")
    assert parse_nccl_topology(both) == parse_nccl_topology(NCCL_SWITCHED_PAIR)


@pytest.mark.parametrize(
    ("text", "rule", "line"),
    [
        ("", "well-formed", "line 1"),
        ("<system>\n<cpu>\n</system>", "well-formed", "line 3"),
        ("<graphs/>", "one <system>", "line 1"),
        ('<system version="1"></system>', "holds a card", "line 1"),
        ('<!DOCTYPE a [<!ENTITY b "bb">]>\n<system>&b;</system>', "no document type", "line 1"),
        (NCCL_BRIDGED.replace('dev="2"', 'dev="two"'), "whole number", "line 16"),
        (NCCL_BRIDGED.replace('dev="2"', 'dev="1"'), "dev of its own", "line 16"),
        (NCCL_SWITCHED_PAIR.replace('count="18"', 'count=""', 1), "whole number", "line 6"),
        (NCCL_SWITCHED_PAIR.replace('name="eth0"', 'name=""'), "has a name", "line 21"),
        ("<system>" + "\n<pci>" * 70 + "</pci>" * 70 + "</system>", "32 deep", "line 33"),
    ],
)
def test_a_broken_or_hostile_dump_is_refused_with_its_line(text: str, rule: str, line: str) -> None:
    with pytest.raises(RuleError, match=rule) as refused:
        parse_nccl_topology(text)
    assert str(refused.value.value).startswith(line + ":")


# -- both ----------------------------------------------------------------------------------------------


def test_both_descriptions_of_a_node_are_put_together() -> None:
    node = merge_node(parse_nvidia_smi_topology(SWITCHED_PAIR), parse_nccl_topology(NCCL_SWITCHED_PAIR))
    assert node is not None
    assert [nic.name for nic in node.nics] == ["mlx5_0", "eth0"]
    bridged = merge_node(parse_nvidia_smi_topology(BRIDGED_PAIRS), parse_nccl_topology(NCCL_BRIDGED))
    assert bridged is not None
    assert bridged.numa == (0, 0, 0, 2)
    assert bridged.link_kind(0, 2) == "PXB"


def test_descriptions_of_different_nodes_are_refused() -> None:
    with pytest.raises(RuleError, match="the same node"):
        merge_node(parse_nvidia_smi_topology(SWITCHED_PAIR), parse_nccl_topology(NCCL_BRIDGED))


# -- Slurm ---------------------------------------------------------------------------------------------


def test_a_tree_tells_who_shares_a_leaf_and_how_large_levels_are() -> None:
    fabric = parse_slurm_topology(SLURM_TREE)
    assert [(leaf.name, len(leaf.nodes)) for leaf in fabric.leaves] == [
        ("leaf0", 4),
        ("leaf1", 4),
        ("leaf2", 3),
    ]
    assert fabric.path("gpu007") == ("leaf1", "spine0", "core")
    assert fabric.levels_apart("gpu001", "gpu004") == 0
    assert fabric.levels_apart("gpu001", "gpu005") == 1
    assert fabric.levels_apart("gpu001", "big1") == 2
    assert fabric.levels_apart("gpu001", "login") is None
    assert fabric.level_sizes == (3, 3, 11)
    assert [fabric.least_level(nodes) for nodes in (1, 3, 4, 11, 12)] == [0, 0, 2, 2, 3]


def test_blocks_are_leaves_and_larger_sizes_join_them() -> None:
    fabric = parse_slurm_topology(SLURM_BLOCKS)
    assert len(fabric.nodes) == 54
    assert fabric.levels_apart("n01", "n18") == 0
    assert fabric.levels_apart("n01", "n36") == 1
    assert fabric.levels_apart("n01", "n37") is None


def test_leaves_without_a_common_switch_are_two_fabrics() -> None:
    fabric = parse_slurm_topology("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n2")
    assert fabric.levels_apart("n1", "n2") is None
    assert fabric.level_sizes == (1,)


@pytest.mark.parametrize(
    ("text", "rule", "line"),
    [
        ("# nothing\n", "at least one switch", "nothing"),
        ("\nNodes=n1", "SwitchName with", "line 2"),
        ("SwitchName=a Nodes=n1 Colour=red", "SwitchName with", "line 1"),
        ("SwitchName=a Nodes=n1 Nodes=n2", "SwitchName with", "line 1"),
        ("Include more.conf", "KEY=VALUE", "line 1"),
        ("SwitchName=a", "nodes or switches", "line 1"),
        ("SwitchName=a Nodes=n1 Switches=b", "nodes or switches", "line 1"),
        ("SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2", "described once", "line 2"),
        ("SwitchName=a Nodes=n[1-3]\nSwitchName=b Nodes=n[3-4]", "one leaf", "line 2: n3"),
        ("SwitchName=a Switches=b", "is described", "line 1: b"),
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a", "a tree", "line 1"),
        (
            "SwitchName=l Nodes=n1\nSwitchName=a Switches=l\nSwitchName=b Switches=l",
            "one switch above",
            "line 3",
        ),
        ("SwitchName=a Nodes=n[1-", "closed bracket", "line 1"),
        ("SwitchName=a Nodes=n]1[", "open and close", "line 1"),
        ("SwitchName=a Nodes=n[[1]]", "open and close", "line 1"),
        ("SwitchName=a Nodes=n[3-1]", "rising ranges", "line 1"),
        ("SwitchName=a Nodes=n[]", "rising ranges", "line 1"),
        ("SwitchName=a Nodes=n1,,n2", "between two commas", "line 1"),
        ("SwitchName=a Nodes=n[1-99999999]", "65536", "line 1"),
        ("SwitchName=a Nodes=n[1-999][1-999]", "65536", "line 1"),
        ("SwitchName=a Nodes=n1\nBlockName=b Nodes=n2", "switches or blocks", "line 2"),
        ("BlockName=b", "names its nodes", "line 1"),
        ("BlockName=b Nodes=n1\nBlockSizes=4,6", "multiple", "line 2"),
        ("BlockName=b Nodes=n1\nBlockSizes=four", "numbers", "line 2"),
    ],
)
def test_a_broken_or_hostile_topology_conf_is_refused_with_its_line(text: str, rule: str, line: str) -> None:
    with pytest.raises(RuleError, match=rule) as refused:
        parse_slurm_topology(text)
    assert line in str(refused.value.value)


_LONG = "x" * 100_000


@pytest.mark.parametrize(
    ("text", "rule", "line"),
    [
        (f"SwitchName=s Nodes={_LONG}[1-65000]", "256 characters", "line 1"),
        (f"SwitchName=s Nodes={'[1]' * 200_000}", "256 characters", "line 1"),
        (f"SwitchName=s Nodes={'[1-65536]' * 20_000}", "65536 hosts", "line 1"),
        (f"SwitchName=s Nodes=n[{'1,' * 500_000}2]", "65536 hosts", "line 1"),
        (f"SwitchName={_LONG} Nodes=n", "256 characters", "line 1"),
        ("SwitchName=s Nodes=a\0b", "visible", "line 1"),
        ("SwitchName=\ud800 Nodes=a", "visible", "line 1"),
        ("\n".join(f"SwitchName=s{i} Nodes=n[1-65536]" for i in range(1000)), "one leaf", "line 2"),
        ("\n".join(f"SwitchName=s{i} Nodes=n{i}x[1-65536]" for i in range(1000)), "65536 nodes", "line 2"),
        ("\n".join(f"SwitchName=s{i} Switches=n{i}x[1-65536]" for i in range(1000)), "switches", "line 2"),
        ("a" * 1_000_000, "KEY=VALUE", "line 1"),
        ("SwitchName=" + " " * 1_000_000 + "=", "SwitchName with|nodes or switches|KEY=VALUE", "line 1"),
        (("a" * 30 + " ") * 30_000, "KEY=VALUE", "line 1"),
        (
            "BlockName=a Nodes=n1\nBlockName=b Nodes=n2\nBlockName=a+1@2 Nodes=n3\nBlockSizes=1,2",
            "names",
            "line 4",
        ),
        (f"BlockName={'b' * 255} Nodes=n\nBlockSizes=1,2", "256 characters", "line 2"),
    ],
    ids=range(15),
)
def test_a_topology_conf_is_counted_before_it_is_expanded(text: str, rule: str, line: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RuleError, match=rule) as refused:
            parse_slurm_topology(text)
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()
    assert line in str(refused.value.value)


def test_blanks_may_stand_around_the_sign_of_a_pair() -> None:
    spread = parse_slurm_topology("SwitchName = a\tNodes= n[1-2] Comment =a=b\\\n LinkSpeed=1")
    assert spread == parse_slurm_topology("SwitchName=a Nodes=n[1-2]")
    with pytest.raises(RuleError, match="KEY=VALUE"):
        parse_slurm_topology("SwitchName=a Nodes=")


def test_host_lists_expand_as_slurm_expands_them() -> None:
    assert expand_hosts("rack[0-1]n[08-10],login") == (
        *("rack0n08", "rack0n09", "rack0n10", "rack1n08", "rack1n09", "rack1n10"),
        "login",
    )
    assert len(expand_hosts(f"n[1-{MAX_HOSTS}]")) == MAX_HOSTS


@given(st.lists(st.tuples(st.integers(0, 999), st.integers(0, 9)), min_size=1, max_size=5))
def test_ranges_of_one_width_expand_to_every_number(spans: list[tuple[int, int]]) -> None:
    body = ",".join(f"{low:04d}-{low + more:04d}" for low, more in spans)
    assert expand_hosts(f"n[{body}]") == tuple(
        f"n{number:04d}" for low, more in spans for number in range(low, low + more + 1)
    )


_PIECES = st.lists(
    st.sampled_from(
        (
            *("SwitchName=a", "Nodes=n[", "1-3", "]", ",", "\n", " ", "\\", "#", "BlockSizes=", "GPU0", "X"),
            *(
                "<system>",
                "<cpu>",
                "</cpu>",
                "<gpu dev='0'/>",
                "</system>",
                "NV2",
                "CPU",
                "NIC0: a",
                "\x1b[4m",
            ),
        )
    ),
    max_size=30,
).map("".join)


@given(st.one_of(st.text(max_size=200), _PIECES))
def test_any_text_is_read_or_refused(text: str) -> None:
    for parse in (parse_nvidia_smi_topology, parse_nccl_topology, parse_slurm_topology):
        try:
            parse(text)
        except RuleError:
            continue


# -- files and clusters --------------------------------------------------------------------------------


def test_files_are_read_together_and_named_when_they_are_wrong(tmp_path: Path) -> None:
    matrix, dump, conf = tmp_path / "topo.txt", tmp_path / "nccl.xml", tmp_path / "topology.conf"
    matrix.write_text(SWITCHED_PAIR)
    dump.write_text(NCCL_SWITCHED_PAIR)
    conf.write_text(SLURM_TREE)
    topology = read_topology(nvidia_smi=matrix, nccl=dump, slurm=conf)
    assert topology.node is not None
    assert topology.fabric is not None
    conf.write_text("SwitchName=a\n")
    with pytest.raises(RuleError, match="nodes or switches") as refused:
        read_topology(slurm=conf)
    assert "topology.conf, line 1" in refused.value.value  # type: ignore[operator]
    conf.write_bytes(b"\xff\xfe\x00")
    for broken in (conf, tmp_path / "absent"):
        with pytest.raises(RuleError, match="readable text"):
            read_topology(slurm=broken)


def test_a_cluster_file_keeps_the_topology() -> None:
    node = parse_nvidia_smi_topology(BRIDGED_PAIRS)
    four = replace(preset("hgx-h200", nodes=2), gpus_per_node=4)
    whole = with_topology(
        with_topology(four, Topology(node=node)), Topology(fabric=parse_slurm_topology(SLURM_TREE))
    )
    whole = replace(whole, notes=("node b is slower",))
    assert whole.topology is not None
    assert (whole.topology.node, whole.hardware_id) == (node, four.hardware_id)
    assert read_cluster(json.loads(json.dumps(cluster_to_mapping(whole)))) == whole


def test_the_topology_of_another_cluster_is_refused() -> None:
    with pytest.raises(RuleError, match="8 cards"):
        with_topology(preset("hgx-h200"), Topology(node=parse_nvidia_smi_topology(SWITCHED_PAIR)))
    with pytest.raises(RuleError, match="its 16 nodes"):
        with_topology(preset("hgx-h200", nodes=16), Topology(fabric=parse_slurm_topology(SLURM_TREE)))


@pytest.mark.parametrize(
    ("topology", "rule"),
    [
        ({"node": {"links": ["X NV1", "NV1"]}}, "square"),
        ({"node": {"links": ["X NV1", "X X"]}}, "a pair"),
        ({"node": {"links": ["X NV1", "NV2 X"]}}, "one known kind"),
        ({"node": {"links": ["X fast", "fast X"]}}, "one known kind"),
        ({"node": {"links": ["X NV1", "NV1 X"], "numa": [0]}}, "for every card"),
        ({"node": {"links": ["X NV1", "NV1 X"], "nics": [{"name": "a", "nearest": [2]}]}}, "as nearest"),
        ({"switches": [{"name": "a", "nodes": ["n"]}, {"name": "a"}]}, "once"),
        ({"switches": [{"name": "a", "nodes": ["n", "n"]}]}, "every node once"),
        ({"switches": [{"name": "a", "nodes": ["n"], "parent": "b"}]}, "a tree"),
        ({"switches": [{"name": "a", "nodes": ["n"], "parent": "a"}]}, "a tree"),
        ({"wires": 3}, "topology"),
    ],
)
def test_a_topology_that_does_not_hang_together_is_refused(topology: dict[str, object], rule: str) -> None:
    body = cluster_to_mapping(preset("hgx-h200")) | {"topology": topology}
    with pytest.raises(RuleError, match=rule):
        read_cluster(body)


def test_one_card_is_an_island() -> None:
    assert NodeTopology((("X",),)).islands == ((0,),)
    assert NodeTopology((("X",),)).kinds == {}
