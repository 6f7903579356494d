"""``flatpeak probe``: what it measures and reads, prints and writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from api.cli import main
from cost_model.cluster_file import load_cluster
from cost_model.presets import preset
from db.repositories import ClusterRepository
from db.session import Database
from tests.cost_model.topologies import BRIDGED_PAIRS, NCCL_SWITCHED_PAIR, SLURM_TREE, SWITCHED_PAIR


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLATPEAK_DATABASE", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    Path("topo.txt").write_text(SWITCHED_PAIR)
    Path("four.txt").write_text(BRIDGED_PAIRS)
    Path("nccl.xml").write_text(NCCL_SWITCHED_PAIR)
    Path("topology.conf").write_text(SLURM_TREE)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["probe", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_measured_machine_is_printed_written_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, progress = run(
        capsys,
        "--ranks",
        "2",
        "--device",
        "cpu",
        "-o",
        "c.yaml",
        "--save",
        "--slurm-topology",
        "topology.conf",
    )
    assert code == 0
    for part in (
        "Transfers inside a node",
        "all-gather",
        "Links, a rank's share",
        "leaf0 (4)",
        "Wrote c.yaml",
    ):
        assert part in text
    assert "host link, 1 of 2 ranks" in progress
    cluster = load_cluster("c.yaml")
    assert cluster.topology is not None
    assert cluster.topology.fabric is not None
    database = Database("sqlite:///flatpeak.db")
    with database.reading() as session:
        (kept,) = ClusterRepository(session).page().items
        assert kept.hardware_id == cluster.hardware_id
    database.close()


def test_programs_get_every_curve_and_link(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, progress = run(capsys, "--ranks", "2", "--device", "cpu", "--time-limit", "1", "--json")
    assert (code, progress) == (0, "")
    answer: dict[str, Any] = json.loads(text)
    measured = answer["measured"]
    assert set(measured["transfers"]["node"]) == {"all_to_all", "ring", "all_gather"}
    assert measured["transfers"]["node"]["ring"][0]["bytes"] == 4096
    assert [set(node) for node in measured["nodes"]] == [{"name", "kind", "rates", "spread"}]
    assert answer["cluster"]["gpus_per_node"] == 2
    assert answer["topology"] is None


def test_topology_files_alone_are_only_read(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = run(capsys, "--nvidia-smi-topo", "four.txt", "--slurm-topology", "topology.conf")
    assert code == 0
    for part in ("1 pairs NV4, 2 pairs PXB, 3 pairs SYS", "0 1 | 2 | 3", "mlx5_1", "3 3 11"):
        assert part in text
    code, text, _ = run(capsys, "--nccl-topo", "nccl.xml", "--json")
    assert json.loads(text)["topology"]["node"]["links"] == ["X NV18", "NV18 X"]
    assert json.loads(text)["measured"] is None


def test_topology_files_go_into_a_known_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = run(
        capsys, "--slurm-topology", "topology.conf", "--cluster", "hgx-h200", "-o", "c.json", "--json"
    )
    assert code == 0
    assert json.loads(text)["hardware_id"] == preset("hgx-h200").hardware_id
    cluster = load_cluster("c.json")
    assert cluster.topology is not None
    assert cluster.topology.fabric is not None
    assert cluster.topology.fabric.level_sizes == (3, 3, 11)


@pytest.mark.parametrize(
    ("arguments", "rule", "value"),
    [
        (["--nvidia-smi-topo", "topo.txt", "--cluster", "hgx-h200"], "joins its 8 cards", "2 cards"),
        (["--nvidia-smi-topo", "topo.txt", "-o", "c.yaml"], "make no cluster", "c.yaml"),
        (["--nvidia-smi-topo", "four.txt", "--nccl-topo", "nccl.xml"], "the same node", "4 cards"),
        (["--slurm-topology", "absent.conf"], "readable text file", "absent.conf"),
        (["--slurm-topology", "topo.txt"], "KEY=VALUE", "topo.txt, line 1"),
        (["--cluster", "hgx-h200"], "topology files", "hgx-h200"),
        (["--ranks", "2", "--nodes", "2"], "needs a cluster", "2"),
        (["--ranks", "1", "-o", "x.txt"], "YAML or JSON", "x.txt"),
        (["--ranks", "1", "-o", "cluster"], "YAML or JSON", "cluster"),
        (["--ray-address", "auto"], "goes with the executor ray", "auto"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], arguments: list[str], rule: str, value: str
) -> None:
    code, text, refusal = run(capsys, *arguments, "--json")
    assert (code, text) == (2, "")
    said = json.loads(refusal)
    assert rule in said["rule"]
    assert value in str(said["value"])
    assert not Path("c.yaml").exists()
