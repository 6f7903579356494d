"""The network between nodes has a name, and the name is part of the fingerprint of what ran over it."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import psutil
import pytest

from cost_model.errors import RuleError
from cost_model.rates_default import default_cost_model
from cost_model.workload import Workload
from tests.cost_model.clusters import cpu_cluster, cpu_network, small_moe
from tuner.executors.local import local_site
from tuner.machine.fingerprint import bare_cluster, local_hardware, local_hardware_id
from tuner.machine.network import VARIABLE, network_name
from tuner.planning.plan import PlanOptions
from tuner.planning.planner import make_plan
from tuner.rows.measured import MeasuredFronts
from tuner.sweeping.sweep_spec import parse_sweep

LOOPBACK = "127.0.0.1"


@pytest.fixture
def classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a kernel would list devices: nothing yet."""
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path


def interface(classes: Path, kind: str, speed: str) -> None:
    """List the interface that holds the loopback address as one of this kind and speed."""
    (name,) = {n for n, held in psutil.net_if_addrs().items() if any(a.address == LOOPBACK for a in held)}
    (classes / "net" / name / kind).mkdir(parents=True)
    (classes / "net" / name / "speed").write_text(f"{speed}\n")


def port(classes: Path, number: int, *, rate: int, state: str = "4: ACTIVE") -> None:
    folder = classes / "infiniband" / f"mlx5_{number}" / "ports" / "1"
    folder.mkdir(parents=True)
    (folder / "rate").write_text(f"{rate} Gb/sec (4X NDR)\n")
    (folder / "state").write_text(f"{state}\n")


@pytest.mark.parametrize(
    ("kind", "speed", "name"),
    [
        ("device", "25000", "ethernet-25g"),
        ("bonding", "2500", "ethernet-2500m"),
        ("device", "-1", None),  # virtio: it does not say
        ("queues", "10000", None),  # veth: it says what means nothing
    ],
)
def test_an_interface_is_believed_when_it_is_a_real_one(
    classes: Path, kind: str, speed: str, name: str | None
) -> None:
    interface(classes, kind, speed)
    assert network_name(LOOPBACK, "cpu", classes=classes) == name


def test_cards_talk_over_rdma_where_there_is_some(classes: Path) -> None:
    interface(classes, "device", "1000")
    for number in range(3):
        port(classes, number, rate=400)
    port(classes, 3, rate=100)
    port(classes, 4, rate=400, state="1: DOWN")
    assert network_name(LOOPBACK, "cuda", classes=classes) == "rdma-1x100g-3x400g"
    assert network_name(LOOPBACK, "cpu", classes=classes) == "ethernet-1g"


def test_what_is_stated_wins_and_must_be_a_name(classes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interface(classes, "device", "1000")
    monkeypatch.setenv(VARIABLE, "efa-3200g")
    assert network_name(LOOPBACK, "cuda", classes=classes) == "efa-3200g"
    monkeypatch.setenv(VARIABLE, "10 Gbit/s")
    with pytest.raises(RuleError, match="a name of up to 64"):
        network_name(LOOPBACK, "cpu", classes=classes)


def test_nodes_are_one_thing_alone_and_another_on_each_network() -> None:
    alone = local_hardware_id("cpu")
    assert alone == local_site("cpu").hardware_id == bare_cluster(local_hardware("cpu")).hardware_id
    joined = {name: local_site("cpu", name).hardware_id for name in ("tbf-1gbit", "tbf-100mbit")}
    assert len({alone, *joined.values()}) == 3
    assert local_site("cpu", "tbf-1gbit").software["network"] == "tbf-1gbit"
    assert "network" not in local_site("cpu").software


def test_samples_over_several_nodes_say_so() -> None:
    sweep = {"operator": "ring_dtp", "target": {"ranks": 4}, "shape": {"vocab": 64}}
    assert parse_sweep(sweep).group_shape == {"vocab": 64}
    over_two = parse_sweep({**sweep, "target": {"ranks": 4, "nodes": 2}})
    assert over_two.group_shape == {"vocab": 64, "ranks": 4, "nodes": 2}


def test_a_measured_point_stands_for_groups_spread_alike() -> None:
    shape = {"tokens_per_rank": 512, "hidden": 256, "vocab": 1000, "ranks": 2, "nodes": 2}
    row = {
        "operator": "ring_dtp",
        "provider": "flatpeak",
        "shape_json": json.dumps(shape),
        "config_json": json.dumps({"ring_mode": "gather", "strip_rows": 256}),
        "pass": "forward_backward",
        "rank": 0,
        "repeat": 0,
        "seconds": 1e-3,
    }
    work = Workload(1024, 1024, activation_bytes=4)
    pins = {"vocab_degree": 2, "max_tokens_per_rank": 512}
    for cluster, mode in (
        (cpu_network(2, 1, 1e7), {"gather"}),
        (cpu_network(1, 2, 1e7), {"weights", "activations"}),
    ):
        samples = pd.DataFrame([{**row, "hardware_id": cluster.hardware_id}])
        options = PlanOptions(measured=MeasuredFronts.of(samples, cluster.hardware_id), fixed=pins)
        plan = make_plan(small_moe(), cluster, work, default_cost_model(cluster), options)
        assert plan.launch.ring_mode in mode


def test_rates_of_a_node_alone_plan_a_network_by_its_own_figures() -> None:
    alone, joined = cpu_cluster(2), cpu_network(2, 2, 1e7)
    plan = make_plan(small_moe(), joined, Workload(1024, 1024), default_cost_model(alone))
    assert any("carried over" in text for text in plan.warnings)
