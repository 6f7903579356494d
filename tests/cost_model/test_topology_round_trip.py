"""Whatever a reader of topologies accepts is written into a cluster file that reads back to the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.sax.saxutils import quoteattr

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from cost_model.cluster_file import cluster_to_mapping, load_cluster, read_cluster
from cost_model.errors import RuleError
from cost_model.presets import preset
from cost_model.topology import MAX_CARDS, MAX_NUMA_NODES, NodeTopology, Topology
from cost_model.topology_import import parse_nvidia_smi_topology, with_topology
from cost_model.topology_nccl import parse_nccl_topology
from cost_model.topology_slurm import parse_slurm_topology

LIKELY, RARE = (
    ("0", "1", "4", "18", "300"),
    ("999", "1000", "4095", "4096", "-1", "--3", "", "9" * 17, "9" * 30, "²"),
)
NUMBERS = st.sampled_from(5 * LIKELY + RARE)
ODD_NAMES = st.one_of(
    st.sampled_from(("x" * 256, "x" * 257, "1e5", "yes", "a\x00", "\ud800", "é", "{}", "~", "a+1@2", "&#1;")),
    st.text(st.characters(exclude_categories=["Z"]), min_size=1, max_size=8),
)
NAMES = st.one_of(*3 * (st.from_regex(r"[a-z]{1,3}[0-9]", fullmatch=True),), ODD_NAMES)


def survives(topology: Topology) -> bool:
    """Through YAML, as ``flatpeak probe`` writes it."""
    cards = topology.node.cards if topology.node else 8
    spec = with_topology(replace(preset("hgx-h200"), gpus_per_node=cards), topology)
    text = yaml.safe_dump(cluster_to_mapping(spec), sort_keys=False).encode().decode()
    return read_cluster(yaml.safe_load(text)) == spec


def check(parse: Callable[[str], NodeTopology], text: str) -> None:
    try:
        node = parse(text)
    except RuleError:
        return
    assert survives(Topology(node=node))


@st.composite
def matrices(draw: st.DrawFn) -> str:
    cards = draw(st.integers(1, 4))
    nics = draw(st.integers(0, 2))
    devices = [f"GPU{n}" for n in range(cards)] + [f"NIC{n}" for n in range(nics)]
    kinds = st.one_of(
        *3 * (st.sampled_from(("PIX", "PXB", "PHB", "NODE", "SYS", "NV4")),),
        st.sampled_from(("NV0", "NV999", "NV1000", "NV٣", "SOC", "X")),
    )
    cells = {(a, b): draw(kinds) for a in range(len(devices)) for b in range(a)}
    lines = ["\t" + "\t".join(devices) + "\tCPU Affinity\tNUMA Affinity"]
    for a, name in enumerate(devices):
        row = ["X" if a == b else cells[max(a, b), min(a, b)] for b in range(len(devices))]
        lines.append("\t".join((name, *row, "0-3", draw(NUMBERS))))
    return "\n".join(lines + [f"  NIC{n}: {draw(NAMES)}" for n in range(nics)])


@st.composite
def dumps(draw: st.DrawFn) -> str:
    def bus(number: int) -> str:
        wires = "".join(
            f'<nvlink target="b{draw(st.integers(0, 3))}" count={quoteattr(draw(NUMBERS))} '
            f'tclass="{draw(st.sampled_from(("0x068000", "0x030200")))}"/>'
            for _ in range(draw(st.integers(0, 2)))
        )
        return f'<pci busid="b{number}"><gpu dev="{number}">{wires}</gpu></pci>'

    def net() -> str:
        return f"<nic><net name={quoteattr(draw(NAMES))} speed={quoteattr(draw(NUMBERS))}/></nic>"

    body = "".join(bus(number) for number in range(draw(st.integers(1, 4))))
    body += "".join(net() for _ in range(draw(st.integers(0, 2))))
    return f"<system><cpu numaid={quoteattr(draw(NUMBERS))}>{body}</cpu></system>"


@st.composite
def confs(draw: st.DrawFn) -> str:
    names = draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    if draw(st.booleans()):
        lines = [f"BlockName={name} Nodes=n{n}[1-{draw(st.integers(1, 9))}]" for n, name in enumerate(names)]
        sizes = draw(st.sampled_from(("", "1,2", "2,4,8", "1,999999", "3", "2,3")))
        return "\n".join([*lines, f"BlockSizes={sizes}" if sizes else ""])
    lines = [f"SwitchName=s{n} Nodes={name}[1-2]" for n, name in enumerate(names)]
    above = draw(st.lists(st.integers(0, len(names) - 1), max_size=2, unique=True))
    return "\n".join(lines + [f"SwitchName={draw(NAMES)} Switches=s{n}" for n in above])


@given(matrices())
@example("GPU0 CPU\nGPU0 X 0-3 9999")
def test_a_matrix_that_is_accepted_survives(text: str) -> None:
    check(parse_nvidia_smi_topology, text)


@given(dumps())
def test_a_dump_that_is_accepted_survives(text: str) -> None:
    check(parse_nccl_topology, text)


@given(confs())
def test_a_topology_conf_that_is_accepted_survives(text: str) -> None:
    try:
        fabric = parse_slurm_topology(text)
    except RuleError:
        return
    assert survives(Topology(fabric=fabric))


def _dump(**given: str) -> str:
    values = {"numaid": "0", "count": "1", "name": "n", **given}
    return (
        f'<system>\n<cpu numaid="{values["numaid"]}">\n'
        f'<pci busid="a"><gpu dev="0">\n<nvlink target="b" count="{values["count"]}" tclass="0x03"/></gpu></pci>\n'
        f'<pci busid="b"><gpu dev="1"/></pci>\n<nic><net name="{values["name"]}"/></nic></cpu></system>'
    )


@pytest.mark.parametrize(
    ("text", "rule", "line"),
    [
        (_dump(count="5000"), "0 to 999 as its count", "line 4"),
        (_dump(count="-3"), "0 to 999 as its count", "line 4"),
        (_dump(count="--3"), "whole number as its count", "line 4"),
        (_dump(count='999"/><nvlink target="b" count="1'), "999 NVLinks", "line 5"),
        (_dump(numaid="99999"), "-1 to 4095 as its numaid", "line 2"),
        (_dump(name="\ud800"), "UTF-8", "line 6"),
        (_dump(name="&#x85;"), "visible", "line 6"),
    ],
)
def test_a_dump_beyond_what_a_cluster_file_holds_is_refused(text: str, rule: str, line: str) -> None:
    with pytest.raises(RuleError, match=rule) as refused:
        parse_nccl_topology(text)
    assert str(refused.value.value).startswith(line + ":")


def _matrix(cards: int, numa: str = "0") -> str:
    names = [f"GPU{n}" for n in range(cards)]
    rows = ["\t".join(["X" if a == b else "SYS" for b in names]) for a in names]
    return "\n".join(
        [
            "\t".join(names) + "\tCPU Affinity",
            *(f"{n}\t{row}\t0-3\t{numa}" for n, row in zip(names, rows, strict=True)),
        ]
    )


@pytest.mark.parametrize(
    ("text", "rule", "line"),
    [
        (_matrix(1, str(MAX_NUMA_NODES)), "4096", "line 2"),
        (_matrix(1, "9" * 5000), "4096", "line 2"),
        (_matrix(MAX_CARDS + 1), "256 cards", "line 1"),
        (_matrix(1) + "\nNIC0: a\x00b", "visible", "line 3"),
        (_matrix(1).replace("GPU0\t", "GPU0\tfoo\x00\t", 1), "visible", "line 1"),
    ],
)
def test_a_matrix_beyond_what_a_cluster_file_holds_is_refused(text: str, rule: str, line: str) -> None:
    with pytest.raises(RuleError, match=rule) as refused:
        parse_nvidia_smi_topology(text)
    assert str(refused.value.value).startswith(line + ":")


def test_what_is_just_within_the_limits_survives(tmp_path: Path) -> None:
    assert survives(Topology(node=parse_nvidia_smi_topology(_matrix(16, str(MAX_NUMA_NODES - 1)))))
    assert survives(Topology(node=parse_nccl_topology(_dump(count="999", numaid="4095", name="n" * 300))))
    fabric = parse_slurm_topology(f"SwitchName={'s' * 256} Nodes={'n' * 255}[1-9]")
    path = tmp_path / "cluster.yaml"
    spec = with_topology(preset("hgx-h200"), Topology(fabric=fabric))
    path.write_text(yaml.safe_dump(cluster_to_mapping(spec)))
    assert load_cluster(path) == spec
