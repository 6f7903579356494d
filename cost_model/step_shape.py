"""StepShape: one training step laid out on a cluster, and the seconds of its parts.

Every method takes a ``RateView`` first; knobs may be numpy arrays, so a planner evaluates whole fronts at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cost_model.cluster_spec import ClusterSpec
from cost_model.latency import GroupLinks, Number, gather_seconds, overlapped_seconds
from cost_model.latency_attention import attention_segment_seconds, dense_mlp_seconds, zero_gather_seconds
from cost_model.latency_dispatch import DispatchShape, dispatch_seconds
from cost_model.latency_head import HeadShape, head_seconds
from cost_model.latency_host import boundary_copy_seconds, exposed_copy_seconds, optimizer_seconds
from cost_model.layout import rank_params
from cost_model.model_spec import ModelSpec
from cost_model.rates import RateView
from cost_model.workload import Workload

SWITCH = 1.3
"""lambda: above this imbalance the least-loaded plan runs, and strided chunks stay within it."""
_GRADIENT_BYTES = 4
"""Replicated gradients are summed in fp32."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Checkpointed segments of one kind: how many a micro-batch runs, and one's forward and backward seconds."""

    count: int
    forward_s: Number
    backward_s: Number


@dataclass(frozen=True, slots=True)
class StepShape:
    """Model, cluster and workload under given degrees; N = ``tokens`` per rank and micro-batch."""

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    sequence_degree: int
    expert_degree: int
    vocab_degree: int
    tokens: int
    accumulation_steps: int
    send_ratio: float | None = None
    """Largest over mean send; the workload's imbalance when routing gave no number."""

    @property
    def boundary_bytes(self) -> int:
        """N*H*b."""
        return self.tokens * self.model.hidden * self.workload.activation_bytes

    @property
    def params_per_rank(self) -> float:
        """Parameters whose optimizer state a rank owns: Theta / W."""
        held = rank_params(self.model, self.cluster.world_size, self.expert_degree)
        return float(held.optimizer)

    def dispatch_shape(self) -> DispatchShape:
        """The MoE layer of a rank."""
        m, w = self.model, self.workload
        alone = self.expert_degree == 1
        return DispatchShape(
            tokens=self.tokens,
            hidden=m.hidden,
            intermediate=m.expert_intermediate,
            experts=m.experts,
            top_k=m.top_k,
            expert_ranks=self.expert_degree,
            scalar_bytes=w.activation_bytes,
            imbalance=1.0 if alone else min(w.imbalance, SWITCH),
            send_ratio=1.0 if alone else (self.send_ratio or min(w.imbalance, SWITCH)),
            migrated_experts=0 if alone else w.migrated_experts,
            matrices=m.mlp_matrices,
        )

    def moe_segment(self, rates: RateView, chunks: Number, schedule: str) -> Segment:
        """MoE segments: the dispatch operator and the shared experts."""
        links = GroupLinks.of(self.cluster, self.expert_degree)
        shape = self.dispatch_shape()
        forward = dispatch_seconds(rates, shape, links, chunks, schedule=schedule, backward=False)
        backward = dispatch_seconds(rates, shape, links, chunks, schedule=schedule, backward=True)
        shared_forward, shared_backward = dense_mlp_seconds(rates, self.tokens, self.model.shared_params)
        return Segment(
            self.model.moe_layers,
            forward * rates.scale("pipelined_llep:forward") + shared_forward,
            backward * rates.scale("pipelined_llep:backward") + shared_backward,
        )

    def other_segments(self, rates: RateView) -> tuple[Segment, ...]:
        """Attention segments (full, sliding) and dense feed-forward segments: nothing a knob changes."""
        model = self.model
        links = GroupLinks.of(self.cluster, self.sequence_degree)
        counts = {
            False: model.attention_layers - model.attention.sliding_layers,
            True: model.attention.sliding_layers,
        }
        found: list[Segment] = []
        for sliding, count in counts.items():
            if count > 0:
                forward, backward = attention_segment_seconds(
                    rates,
                    model,
                    self.tokens,
                    self.workload.context_tokens,
                    links=links,
                    scalar_bytes=self.workload.activation_bytes,
                    sliding=sliding,
                )
                found.append(Segment(count, forward, backward))
        if model.mixer_layers:
            forward, backward = dense_mlp_seconds(rates, self.tokens, model.mixer_params)
            found.append(Segment(model.mixer_layers, forward, backward))
        if model.dense_layers:
            forward, backward = dense_mlp_seconds(rates, self.tokens, model.dense_mlp_params)
            found.append(Segment(model.dense_layers, forward, backward))
        return tuple(found)

    def attention_s(self, rates: RateView) -> float:
        """A micro-batch's attention and dense segments, forward and backward."""
        return float(sum(s.count * (s.forward_s + s.backward_s) for s in self.other_segments(rates)))

    def dispatch_s(self, rates: RateView, chunks: Number, schedule: str) -> Number:
        """A micro-batch's MoE segments, forward and backward."""
        moe = self.moe_segment(rates, chunks, schedule)
        return moe.count * (moe.forward_s + moe.backward_s)

    def head_s(self, rates: RateView, ring_mode: str, strip_rows: Number) -> Number:
        """A micro-batch's head, forward and backward."""
        shape = HeadShape(
            self.tokens,
            self.model.hidden,
            self.model.vocab,
            self.vocab_degree,
            self.workload.activation_bytes,
        )
        links = GroupLinks.of(self.cluster, self.vocab_degree)
        forward = head_seconds(
            rates, shape, links, ring_mode=ring_mode, strip_rows=strip_rows, backward=False
        )
        backward = head_seconds(
            rates, shape, links, ring_mode=ring_mode, strip_rows=strip_rows, backward=True
        )
        return forward * rates.scale("ring_dtp:forward") + backward * rates.scale("ring_dtp:backward")

    def zero_exposed_s(self, rates: RateView, moe: Segment) -> Number:
        """What a micro-batch's layers do not hide of the dense weights' gathers and reduce-scatters."""
        model = self.model
        links = GroupLinks.of(self.cluster, self.cluster.world_size)
        others = self.other_segments(rates)
        inner = model.dense_params - model.head_params * (1 if model.tied_embeddings else 2)
        layer_bytes = 2.0 * inner / model.layers
        gather_forward, gather_backward = zero_gather_seconds(rates, links, layer_bytes)
        forward = sum((s.count * s.forward_s for s in others), moe.count * moe.forward_s) / model.layers
        backward = sum((s.count * s.backward_s for s in others), moe.count * moe.backward_s) / model.layers
        eta = rates["overlap"]
        return model.layers * (
            overlapped_seconds(forward, gather_forward, eta)
            - forward
            + overlapped_seconds(backward, gather_backward, eta)
            - backward
        )

    def boundaries_exposed_s(self, rates: RateView, moe: Segment, offloaded: Number) -> Number:
        """What the blocks do not hide of ``offloaded`` boundaries' copies out (forward) and back (backward).

        Blocks are taken in forward order, so a number of boundaries holds each kind of block in proportion.
        """
        copy = boundary_copy_seconds(rates, float(self.boundary_bytes), self.cluster.gpus_per_node)
        share = np.asarray(offloaded, dtype=np.float64) / (self.model.boundaries + 1.0)
        exposed: Number = 0.0
        for segment in (*self.other_segments(rates), moe):
            out = exposed_copy_seconds(rates, copy, segment.forward_s)
            back = exposed_copy_seconds(rates, copy, segment.backward_s)
            exposed = exposed + segment.count * (out + back)
        return share * exposed

    def optimizer_s(
        self, rates: RateView, *, engine: str, bucket_params: Number, staging_slots: Number, host_share: float
    ) -> Number:
        """The update of a rank's share of the parameters, once a step."""
        seconds = optimizer_seconds(
            rates,
            self.params_per_rank,
            engine=engine,
            bucket_params=bucket_params,
            staging_slots=staging_slots,
            host_share=host_share,
            active=self.cluster.gpus_per_node,
        )
        return seconds * rates.scale("stream_adamw:step")

    def gradient_reduce_s(self, rates: RateView) -> float:
        """Gradients of replicated experts and head shards, reduced and the weights gathered, once a step."""
        world = self.cluster.world_size
        total = 0.0
        for degree, params in (
            (self.expert_degree, self.model.routed_params / self.expert_degree),
            (self.vocab_degree, self.model.head_params / self.vocab_degree),
        ):
            if degree < world:
                links = GroupLinks.strided(self.cluster, world // degree, degree)
                total += float(gather_seconds(rates, links, params * (_GRADIENT_BYTES + 2)))
        return total
