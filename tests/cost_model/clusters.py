"""Clusters and models of the cost model's tests, written out so that no preset's change moves a test."""

from __future__ import annotations

from dataclasses import replace

from cost_model.cluster_spec import ClusterSpec, Figure, GpuSpec, HostSpec, LinkTier
from cost_model.model_spec import AttentionSpec, ModelSpec


def gpu_cluster(
    nodes: int = 1, *, hbm_gib: float = 140.0, ram_bytes: float = 2e12, sm_count: int = 132
) -> ClusterSpec:
    """Eight-card nodes with round figures."""
    return ClusterSpec(
        name="test-gpus",
        nodes=nodes,
        gpus_per_node=8,
        gpu=GpuSpec(
            name="Test GPU",
            device="cuda",
            compute_capability="9.0",
            sm_count=sm_count,
            hbm_bytes=Figure(hbm_gib * 2**30, "datasheet"),
            peak_flops=Figure(1e15, "datasheet"),
            hbm_bandwidth_bytes_per_s=Figure(4e12, "datasheet"),
        ),
        host=HostSpec(
            Figure(ram_bytes, "stated"),
            64,
            "test cpu",
            ((1, Figure(50e9, "assumed")), (8, Figure(16e9, "assumed"))),
            Figure(4e9, "assumed"),
        ),
        tiers=(
            LinkTier("node", "nvlink", Figure(30e-6, "assumed"), Figure(450e9, "datasheet")),
            LinkTier("cluster", "nic", Figure(5e-6, "assumed"), Figure(50e9, "datasheet")),
        ),
    )


def cpu_cluster(ranks: int = 4, *, ram_bytes: float = 16e9) -> ClusterSpec:
    """One machine whose ranks are processes."""
    return ClusterSpec(
        name="test-cpu",
        nodes=1,
        gpus_per_node=ranks,
        gpu=GpuSpec(
            name="test cpu",
            device="cpu",
            compute_capability="",
            sm_count=1,
            hbm_bytes=Figure(ram_bytes / ranks, "measured"),
            peak_flops=Figure(2e10, "measured"),
            hbm_bandwidth_bytes_per_s=Figure(4e9, "measured"),
        ),
        host=HostSpec(
            Figure(ram_bytes, "measured"),
            2,
            "test cpu",
            ((1, Figure(5e9, "measured")), (4, Figure(2e9, "measured"))),
            Figure(1e8, "measured"),
        ),
        tiers=(LinkTier("node", "gloo", Figure(200e-6, "measured"), Figure(0.5e9, "measured")),),
        outside_allocator_bytes=Figure(100 * 2**20, "measured"),
    )


def cpu_network(nodes: int, ranks: int, bytes_per_s: float, name: str = "ethernet-1g") -> ClusterSpec:
    """Machines of so many ranks each, joined by a network."""
    alone = cpu_cluster(ranks)
    between = LinkTier("cluster", name, Figure(3e-4, "measured"), Figure(bytes_per_s, "measured"))
    return replace(alone, nodes=nodes, tiers=(*alone.tiers, between))


def small_moe(*, layers: int = 4, experts: int = 16, vocab: int = 1000, heads: int = 8) -> ModelSpec:
    """A Mixture-of-Experts model with round sizes."""
    return ModelSpec(
        name="small-moe",
        family="test",
        hidden=256,
        layers=layers,
        vocab=vocab,
        attention=AttentionSpec(kind="gqa", heads=heads, kv_heads=4, head_dim=32, v_head_dim=32),
        experts=experts,
        top_k=4,
        expert_intermediate=512,
        moe_layers=layers,
    )
