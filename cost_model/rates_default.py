"""The cost model of a cluster nobody has measured: datasheet figures times efficiencies seen on one H200."""

from __future__ import annotations

from cost_model.cluster_spec import ClusterSpec, Figure, LinkTier
from cost_model.provenance import Provenance
from cost_model.rates import CostModel, Rate, Unit, content_id

_REFERENCE_GPU = "H200"
# A datasheet's dense bf16 rate, and what the largest matmuls really reached on the same card.
_REFERENCE_PEAK, _REFERENCE_REACHED = 989e12, 763e12
_REFERENCE_NVLINK = 450e9

# Grouped matmul, 48 experts, 7168 -> 2048, bf16, H200: 116, 481, 670 TFLOP/s at 43, 171, 683 rows an expert.
# F(rows) = ceiling * (1 + (half_rows / rows)^8)^(-1/8) meets the three within 4 %.
_GEMM_CEILING = 685e12
_GEMM_HALF_ROWS = 250.0
_DENSE_FLOPS = 700e12
_ATTENTION_FLOPS = 430e12  # causal, head width 64, 32K tokens and more, forward and backward alike
# NCCL on two H200: all-to-all 158, 238, 283, 330 GB/s and ring hop 179, 264, 302, 358 GB/s at 16..1024 MiB.
_ALL_TO_ALL_ALPHA, _ALL_TO_ALL_RATE = 60e-6, 330e9
_RING_ALPHA, _RING_RATE = 70e-6, 360e9
CREATED = "2026-01-01T00:00:00Z"


def _rate(value: float, spread: float, provenance: Provenance, unit: Unit, note: str = "") -> Rate:
    high = value * (1 + spread)
    if unit == "share":
        high = min(1.0, high)
    return Rate(value, value / (1 + spread), high, provenance, unit, note)


def cluster_facts(cluster: ClusterSpec) -> dict[str, float]:
    """Datasheet figures by which rates are carried from one card to another."""
    return {
        "peak_flops": cluster.gpu.peak_flops.value,
        "hbm_bytes_per_s": cluster.gpu.hbm_bandwidth_bytes_per_s.value,
    }


def _figure_provenance(figure: Figure) -> Provenance:
    return "measured" if figure.source == "measured" else "analytic"


def _tier_rates(tier: LinkTier, known: Provenance) -> dict[str, Rate]:
    """all-to-all and ring curves of one tier, alpha + bytes / B."""
    bandwidth = tier.bandwidth_bytes_per_s
    source: Provenance = "measured" if bandwidth.source == "measured" else known
    spread = 0.15 if source == "measured" else 0.4
    efficiency = 1.0 if bandwidth.source == "measured" else _ALL_TO_ALL_RATE / _REFERENCE_NVLINK
    ring = 1.0 if bandwidth.source == "measured" else _RING_RATE / _REFERENCE_NVLINK
    alpha = tier.latency_s.value
    floor_a2a = max(alpha, _ALL_TO_ALL_ALPHA) if bandwidth.source != "measured" else max(alpha, 1e-6)
    floor_ring = max(alpha, _RING_ALPHA) if bandwidth.source != "measured" else max(alpha, 1e-6)
    scope = tier.scope
    return {
        f"all_to_all_{scope}_alpha_s": _rate(floor_a2a, 0.8, source, "s", tier.name),
        f"all_to_all_{scope}_bytes_per_s": _rate(
            bandwidth.value * efficiency, spread, source, "B/s", tier.name
        ),
        f"ring_{scope}_alpha_s": _rate(floor_ring, 0.8, source, "s", tier.name),
        f"ring_{scope}_bytes_per_s": _rate(bandwidth.value * ring, spread, source, "B/s", tier.name),
    }


def default_cost_model(cluster: ClusterSpec) -> CostModel:
    """Rates of ``cluster`` from its own figures and from efficiencies measured on one and two H200.

    On a cluster whose figures were probed (``measured``) links and host rates are taken as they are; everything
    else is ``transferred`` (the card the efficiencies were measured on) or ``analytic`` (any other).
    """
    gpu, host = cluster.gpu, cluster.host
    on_cpu = gpu.device == "cpu"
    known: Provenance = "transferred" if _REFERENCE_GPU in gpu.name else "analytic"
    spread = 0.2 if known == "transferred" else 0.5
    peak = gpu.peak_flops.value
    if on_cpu:
        # A probed CPU rate is what a large matmul reaches, not a datasheet ceiling.
        ceiling, dense, attention, half_rows = 0.8 * peak, 0.9 * peak, 0.3 * peak, 32.0
        known, spread = "analytic", 1.0
    else:
        whole = _REFERENCE_REACHED if gpu.peak_flops.source == "measured" else _REFERENCE_PEAK
        ceiling, dense = _GEMM_CEILING / whole * peak, _DENSE_FLOPS / whole * peak
        attention, half_rows = _ATTENTION_FLOPS / whole * peak, _GEMM_HALF_ROWS
    hbm = gpu.hbm_bandwidth_bytes_per_s
    rates: dict[str, Rate] = {
        "gemm_ceiling_flops": _rate(ceiling, spread, known, "FLOP/s"),
        "gemm_half_rows": _rate(half_rows, spread, known, "rows"),
        "expert_t0_s": _rate(20e-6 if on_cpu else 1e-6, 1.0, known, "s"),
        "dense_flops": _rate(dense, spread, known, "FLOP/s"),
        "attention_flops": _rate(attention, spread, known, "FLOP/s", "causal scores at head width 64"),
        "hbm_bytes_per_s": _rate(
            hbm.value * (0.9 if not on_cpu else 1.0), 0.15, _figure_provenance(hbm), "B/s"
        ),
        "route_passes": _rate(5.0, 0.3, known, "passes", "reads and writes of the k*N*H routed rows a pass"),
        "strip_passes": _rate(3.0, 0.4, known, "passes", "reads and writes of an fp32 logits strip"),
        "host_chunk_s": _rate(1.5e-3 if on_cpu else 0.6e-3, 1.0, "analytic", "s", "host time a chunk"),
        "plan_sync_s": _rate(2e-3 if on_cpu else 0.8e-3, 1.0, "analytic", "s", "plan and sync a layer"),
        "tile_s": _rate(100e-6 if on_cpu else 25e-6, 1.0, "analytic", "s", "launches of one strip tile"),
        "segment_s": _rate(
            1e-3 if on_cpu else 0.3e-3, 1.0, "analytic", "s", "host time of a checkpointed segment"
        ),
        # ranks of one processor move each other's bytes with the cores that multiply; a network moves them itself
        "overlap": _rate(
            0.05 if on_cpu and cluster.nodes == 1 else 0.4,
            0.5,
            known,
            "share",
            "hidden share of the shorter activity",
        ),
        "copy_overlap": _rate(
            0.05 if on_cpu else 0.9, 0.5 if on_cpu else 0.11, "analytic", "share", "of a copy behind compute"
        ),
        "host_duplex": _rate(
            1.0 if on_cpu else 0.85, 0.3, known, "share", "host link each way with both busy, over one alone"
        ),
        "head_sync_s": _rate(1e-3, 1.0, "analytic", "s", "sizes agreed before a pass of the head"),
        "block_matrices": _rate(3.0, 0.5, "analytic", "passes", "H*I matmuls of a swept checkpoint block"),
        "split_overlap": _rate(0.47, 0.4, known, "share", "hidden share of the shorter optimizer engine"),
        "host_copy_alpha_s": _rate(45e-6, 0.3, known, "s", "fixed cost of one host copy"),
        "adam_device_params_per_s": _rate(
            max(1e6, hbm.value * 0.8 / 30.0),
            0.25,
            known,
            "params/s",
            "fused update of device or staged state",
        ),
        "adam_host_params_per_s": _rate(
            host.cpu_adam_params_per_s.value,
            0.3,
            _figure_provenance(host.cpu_adam_params_per_s),
            "params/s",
            "a node",
        ),
        "bucket_s": _rate(60e-6, 0.5, "analytic", "s", "launches of one optimizer bucket"),
    }
    for active, figure in host.link_bytes_per_s:
        rates[f"host_link_{active}_bytes_per_s"] = _rate(
            figure.value, 0.15 if figure.source == "measured" else 0.35, _figure_provenance(figure), "B/s"
        )
    for tier in cluster.tiers:
        rates.update(_tier_rates(tier, known))
    body = CostModel(
        id="",
        version=1,
        hardware_id=cluster.hardware_id,
        software="",
        created=CREATED,
        rates=rates,
        facts=cluster_facts(cluster),
    )
    return CostModel(
        id=content_id(body),
        version=1,
        hardware_id=body.hardware_id,
        software="",
        created=CREATED,
        rates=rates,
        facts=body.facts,
    )
