"""Clusters from files: round trips, and every malformed one refused with the path of the mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.cluster_file import cluster_to_mapping, load_cluster, read_cluster
from cost_model.cluster_spec import ClusterSpec, Figure, GpuSpec, HostSpec, LinkTier
from cost_model.errors import RuleError
from cost_model.presets import PRESET_NAMES, preset

figures = st.builds(
    Figure,
    st.floats(1e-9, 1e18, allow_nan=False),
    st.sampled_from(["datasheet", "measured", "assumed", "stated"]),
)
names = st.text(min_size=1, max_size=12)
clusters = st.builds(
    ClusterSpec,
    name=names,
    nodes=st.integers(1, 64),
    gpus_per_node=st.integers(1, 16),
    gpu=st.builds(
        GpuSpec,
        name=names,
        device=st.sampled_from(["cuda", "cpu"]),
        compute_capability=st.sampled_from(["9.0", ""]),
        sm_count=st.integers(0, 200),
        hbm_bytes=figures,
        peak_flops=figures,
        hbm_bandwidth_bytes_per_s=figures,
    ),
    host=st.builds(
        HostSpec,
        ram_bytes=figures,
        cores=st.integers(1, 256),
        cpu_name=st.text(max_size=8),
        link_bytes_per_s=st.lists(st.integers(1, 16), min_size=1, max_size=4, unique=True).flatmap(
            lambda active: st.tuples(*(st.tuples(st.just(a), figures) for a in sorted(active)))
        ),
        cpu_adam_params_per_s=figures,
    ),
    tiers=st.tuples(
        st.builds(LinkTier, st.just("node"), names, figures, figures),
        st.builds(LinkTier, st.just("cluster"), names, figures, figures),
    ),
    max_chunk_tokens=st.none() | st.integers(1, 10**6),
    outside_allocator_bytes=figures,
    allocator_slack_fraction=st.builds(Figure, st.floats(0, 0.9), st.just("stated")),
)


@settings(max_examples=60, deadline=None)
@given(cluster=clusters)
def test_round_trip_through_json(cluster: ClusterSpec) -> None:
    assert read_cluster(json.loads(json.dumps(cluster_to_mapping(cluster)))) == cluster


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_presets_round_trip_through_both_kinds_of_file(name: str, tmp_path: Path) -> None:
    cluster = preset(name, nodes=2)
    (tmp_path / "c.json").write_text(json.dumps(cluster_to_mapping(cluster)))
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(cluster_to_mapping(cluster)))
    assert load_cluster(tmp_path / "c.json") == load_cluster(tmp_path / "c.yaml") == cluster


def test_plain_numbers_are_stated_and_yaml_exponents_are_numbers(tmp_path: Path) -> None:
    body = cluster_to_mapping(preset("hgx-h200"))
    body["host"]["ram_bytes"] = 10**12
    file = tmp_path / "c.yaml"
    text = yaml.safe_dump(body).replace("ram_bytes: 1000000000000", "ram_bytes: 1e12")
    assert "ram_bytes: 1e12" in text
    file.write_text(text)
    assert load_cluster(file).host.ram_bytes == Figure(1e12, "stated")


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("gpus_per_node", 0, "gpus_per_node"),
        ("nodes", 0, "nodes"),
        ("nodes", True, "nodes"),
        ("nodes", "2", "nodes"),
        ("gpu", None, "gpu"),
        ("gpu.hbm_bytes", 0, "gpu.hbm_bytes"),
        ("gpu.hbm_bytes", -5, "gpu.hbm_bytes"),
        ("gpu.hbm_bytes", "lots", "gpu.hbm_bytes"),
        ("gpu.hbm_bytes", float("nan"), "gpu.hbm_bytes"),
        ("gpu.peak_flops", float("inf"), "gpu.peak_flops"),
        ("gpu.hbm_bytes", {"value": 1, "source": "guess"}, "gpu.hbm_bytes"),
        ("gpu.device", "tpu", "gpu.device"),
        ("gpu.surprise", 1, "gpu.surprise"),
        ("host.link_bytes_per_s", [], "host.link_bytes_per_s"),
        ("host.link_bytes_per_s", [[1, 5e9], [1, 6e9]], "host.link_bytes_per_s"),
        ("tiers", [], "tiers"),
        ("max_chunk_tokens", 0, "max_chunk_tokens"),
        ("allocator_slack_fraction", 1.5, "allocator_slack_fraction"),
        ("nodes", 2**19, "ranks"),
    ],
)
def test_mistakes_are_refused_by_path(path: str, value: Any, named: str) -> None:
    body = cluster_to_mapping(preset("hgx-h100", nodes=2))
    *parents, last = path.split(".")
    target = body
    for parent in parents:
        target = target[parent]
    target[last] = value
    with pytest.raises(RuleError) as caught:
        read_cluster(body)
    assert named in caught.value.rule
    assert caught.value.remedy


def test_missing_fields_and_missing_tiers_are_named() -> None:
    body = cluster_to_mapping(preset("hgx-h100", nodes=2))
    with pytest.raises(RuleError, match=r"must give gpu\.name"):
        read_cluster({**body, "gpu": {k: v for k, v in body["gpu"].items() if k != "name"}})
    for scope in ("node", "cluster"):
        kept = [tier for tier in body["tiers"] if tier["scope"] != scope]
        with pytest.raises(RuleError, match=f"scope '{scope}'"):
            read_cluster({**body, "tiers": kept})


@pytest.mark.parametrize("body", [None, [], "hgx", 3])
def test_what_is_no_mapping_is_refused(body: Any) -> None:
    with pytest.raises(RuleError, match="must be a mapping"):
        read_cluster(body)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"a: [1", b"- 1"])
def test_files_that_cannot_be_read(content: bytes, tmp_path: Path) -> None:
    for suffix in ("json", "yaml"):
        file = tmp_path / f"c.{suffix}"
        file.write_bytes(content)
        with pytest.raises(RuleError):
            load_cluster(file)
    with pytest.raises(RuleError, match="readable"):
        load_cluster(tmp_path / "absent.yaml")


def test_presets_say_where_each_figure_comes_from() -> None:
    h200 = preset("hgx-h200", nodes=8)
    assert h200.world_size == 64
    assert h200.gpu.hbm_bytes == Figure(139.8 * 2**30, "measured")
    assert h200.gpu.hbm_bytes.value < 143771 * 2**20  # the driver keeps some of the card
    sources = {name: preset(name).gpu.hbm_bandwidth_bytes_per_s.source for name in PRESET_NAMES}
    assert set(sources.values()) == {"datasheet"}
    assert preset("hgx-h100").gpu.hbm_bytes.value < h200.gpu.hbm_bytes.value
    assert h200.gpu.hbm_bytes.value < preset("hgx-b200").gpu.hbm_bytes.value
    network = next(tier for tier in h200.tiers if tier.scope == "cluster")
    assert network.bandwidth_bytes_per_s == Figure(50e9, "datasheet")


def test_unknown_presets_and_node_counts() -> None:
    with pytest.raises(RuleError, match="preset") as caught:
        preset("hgx-h900")
    assert "hgx-h200" in caught.value.remedy
    for nodes in (0, -1, True, 1.5, "2", 10**9):
        with pytest.raises(RuleError, match="nodes"):
            preset("hgx-h200", nodes=nodes)  # type: ignore[arg-type]


def test_same_gpu_name_in_another_node_is_another_hardware() -> None:
    body = cluster_to_mapping(preset("hgx-h200"))
    one = read_cluster(body).hardware_id
    assert read_cluster({**body, "nodes": 4}).hardware_id == one
    for change in (
        {"gpu": {**body["gpu"], "sm_count": 114}},
        {"gpus_per_node": 4},
        {"tiers": [{**body["tiers"][0], "name": "pcie"}, body["tiers"][1]]},
        {"gpu": {**body["gpu"], "hbm_bytes": 90 * 2**30}},
    ):
        assert read_cluster({**body, **change}).hardware_id != one
