"""PipelinedLLEP and the dispatches it is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from operators.bounds.pipelined_llep import pipelined_llep_terms
from tuner.operators.common import (
    SCALAR_BYTES,
    TOLERANCE,
    check_divides,
    check_dtype,
    drop_gradients,
    normal,
    powers_of_two,
    relative_error,
    worst,
)
from tuner.registry import Runnable, Shape, check_keys
from tuner.routing.load import dispatch_load
from tuner.space import Config, Knob, Space

if TYPE_CHECKING:
    from torch import Tensor

    from operators.dispatch_launch import DispatchLaunch
    from operators.expert_mlp import ExpertWeights
    from operators.ranks import Ranks
    from operators.routing import Routing

# Widths that grouped matmuls take: rows start on 16 bytes.
_CHECK_TOKENS, _CHECK_HIDDEN, _CHECK_INTERMEDIATE = 24, 16, 8
_MAX_CHUNKS = 64


class PipelinedLlepAdapter:
    """One MoE layer.

    Shape: ``tokens_per_rank``, ``hidden``, ``intermediate``, ``experts``, ``top_k``, ``dtype``, ``profile`` (a
    routing profile's name), ``min_rows``. Knobs: ``chunks`` (K; c = ⌈N/K⌉), ``dispatch_schedule``. Providers:
    ``flatpeak``; ``llep``, all at once; ``standard_ep``, all at once and nothing migrates; ``nested``, the
    paper's checkpoint per chunk.
    """

    name = "pipelined_llep"
    version = 3
    providers = ("flatpeak", "llep", "standard_ep", "nested")
    has_peers, multiplies = True, True

    def shape(self, given: Mapping[str, Any], ranks: int) -> Shape:
        required = dict.fromkeys(("tokens_per_rank", "hidden", "intermediate", "experts", "top_k"), int)
        optional = {"dtype": "float32", "profile": "balanced", "min_rows": 1024}
        shape = check_keys(self.name, given, required, optional, {"experts": 2**16, "top_k": 2**10})
        check_dtype(self.name, shape["dtype"])
        check_divides("the experts", shape["experts"], ranks)
        # the profile is read here, so that a misspelt one is refused before a rank is started
        _routing(shape, 4, 0, ranks, "cpu")
        return shape

    def space(self, shape: Shape, ranks: int, provider: str) -> Space:
        del ranks
        if provider in ("llep", "standard_ep"):
            return Space(())
        chunks = Knob("chunks", powers_of_two(1, min(_MAX_CHUNKS, shape["tokens_per_rank"])), "ordered")
        if provider == "nested":
            return Space((chunks,))
        return Space((chunks, Knob("dispatch_schedule", ("serial", "prefetch", "overlap"))))

    def canonical(self, shape: Shape, config: Config, ranks: int) -> Config:
        del ranks
        one = dict(config)
        if "chunks" in one:
            # K_max = K and c = ⌈N/K⌉ may run fewer chunks than K: the number run is the point's identity
            tokens = shape["tokens_per_rank"]
            one["chunks"] = -(-tokens // -(-tokens // max(1, int(one["chunks"]))))
            if one["chunks"] == 1 and "dispatch_schedule" in one:
                one["dispatch_schedule"] = "serial"  # there is no other chunk to overlap with
        return one

    def bound_bytes(self, shape: Shape, config: Config, ranks: int, provider: str) -> dict[str, int]:
        local = shape["experts"] // ranks
        scalar = SCALAR_BYTES[shape["dtype"]]
        # nested keeps the rows of every chunk until backward: its chunks bound nothing
        chunks = 1 if provider == "nested" else int(config.get("chunks", 1))
        load = dispatch_load(
            profile=shape["profile"],
            tokens=shape["tokens_per_rank"],
            experts=shape["experts"],
            top_k=shape["top_k"],
            ranks=ranks,
            chunks=chunks,
            min_rows=shape["min_rows"],
            migrate=provider != "standard_ep",
        )
        terms = pipelined_llep_terms(
            tokens=shape["tokens_per_rank"],
            hidden=shape["hidden"],
            intermediate=shape["intermediate"],
            experts=shape["experts"],
            top_k=shape["top_k"],
            expert_ranks=ranks,
            chunks=chunks,
            schedule=str(config.get("dispatch_schedule", "serial")),
            pass_="backward",  # noqa: S106
            scalar_bytes=scalar,
            rows_per_chunk=load.rows_per_chunk,
            migrated_experts=load.migrated_experts,
        )
        tokens, hidden, inner = shape["tokens_per_rank"], shape["hidden"], shape["intermediate"]
        routes = tokens * shape["top_k"]
        # beside the dispatch itself: the rank's experts with their gradients, the scores with theirs, the ids
        # and what sorts them (int64), and the gradient that comes in
        terms |= {
            "weights_grads": 2 * scalar * local * 3 * hidden * inner,
            "routing": 2 * scalar * tokens * shape["experts"] + 8 * 8 * routes + scalar * tokens * hidden,
        }
        if provider == "nested":
            terms["boundaries_resident"] = scalar * load.rows_per_chunk * (hidden + inner)
        return terms

    def build(self, shape: Shape, config: Config, ranks: Ranks, device: str, provider: str) -> Runnable:
        layer = _Layer(shape, config, ranks, device, provider)
        outputs: list[Tensor] = []

        def forward() -> None:
            outputs.append(layer.forward())

        def backward() -> None:
            outputs.pop().backward(layer.upstream_NH)

        def reset() -> None:
            outputs.clear()
            drop_gradients(*layer.leaves)

        held = (*layer.leaves, layer.upstream_NH, layer.routing.ids_NK)
        return Runnable({"forward": forward, "backward": backward}, held, reset)

    def reference_check(
        self, shape: Shape, config: Config, ranks: Ranks, device: str, provider: str
    ) -> tuple[float, float]:
        problem = {
            **shape,
            "tokens_per_rank": _CHECK_TOKENS,
            "hidden": _CHECK_HIDDEN,
            "intermediate": _CHECK_INTERMEDIATE,
            "min_rows": 1,
        }
        layer = _Layer(problem, config, ranks, device, provider)
        out_NH = layer.forward()
        out_NH.backward(layer.upstream_NH)
        return worst(_errors(layer, out_NH)), TOLERANCE[shape["dtype"]]


class _Layer:
    """One rank's part of a layer: inputs, experts, routing and launch."""

    def __init__(self, shape: Shape, config: Config, ranks: Ranks, device: str, provider: str) -> None:
        from operators.expert_mlp import ExpertWeights

        self.shape, self.ranks, self.device = shape, ranks, device
        tokens, hidden, experts = shape["tokens_per_rank"], shape["hidden"], shape["experts"]
        own = slice(ranks.rank * experts // ranks.size, (ranks.rank + 1) * experts // ranks.size)
        gate_up, down = all_experts(shape, own, device)
        self.weights: ExpertWeights = ExpertWeights(gate_up.requires_grad_(), down.requires_grad_())
        dtype = shape["dtype"]
        self.hidden_NH = normal(
            tokens, hidden, seed=1 + ranks.rank, dtype=dtype, device=device
        ).requires_grad_()
        scores_NE = normal(tokens, experts, seed=2001 + ranks.rank, dtype=dtype, device=device).softmax(1)
        self.scores_NE = scores_NE.detach().requires_grad_()
        self.upstream_NH = normal(tokens, hidden, seed=3001 + ranks.rank, dtype=dtype, device=device)
        self.routing: Routing = _routing(shape, tokens, ranks.rank, ranks.size, device)
        self.launch: DispatchLaunch = _launch(shape, config, provider)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return (self.hidden_NH, self.scores_NE, self.weights.gate_up_EGH, self.weights.down_EHI)

    def forward(self) -> Tensor:
        from operators.pipelined_llep import pipelined_llep

        return pipelined_llep(
            self.hidden_NH, self.scores_NE, self.routing, self.weights, ranks=self.ranks, launch=self.launch
        )


def all_experts(shape: Shape, which: slice, device: str) -> tuple[Tensor, Tensor]:
    """Gate-up ``[E, 2I, H]`` and down ``[E, H, I]`` weights of some experts, each seeded by its number."""
    import torch

    hidden, inner, dtype = shape["hidden"], shape["intermediate"], shape["dtype"]
    numbers = range(*which.indices(shape["experts"]))
    gate_up = [
        normal(2 * inner, hidden, seed=10_000 + e, dtype=dtype, device=device, scale=hidden**-0.5)
        for e in numbers
    ]
    down = [
        normal(hidden, inner, seed=20_000 + e, dtype=dtype, device=device, scale=inner**-0.5) for e in numbers
    ]
    return torch.stack(gate_up), torch.stack(down)


def _errors(layer: _Layer, out_NH: Tensor) -> list[float]:
    """Against every expert computed on every rank in float64, one expert after the other."""
    import torch
    from torch.nn.functional import silu

    shape, ranks = layer.shape, layer.ranks
    gate_up, down = (w.double().requires_grad_() for w in all_experts(shape, slice(None), layer.device))
    x_NH = layer.hidden_NH.detach().double().requires_grad_()
    scores_NE = layer.scores_NE.detach().double().requires_grad_()
    ids_NK = layer.routing.ids_NK
    weights_NK = scores_NE.gather(1, ids_NK)
    dense_NH = torch.zeros_like(x_NH)
    for expert in range(shape["experts"]):
        gate, up = (x_NH @ gate_up[expert].T).chunk(2, dim=1)
        share_N = (weights_NK * (ids_NK == expert)).sum(dim=1, keepdim=True)
        dense_NH = dense_NH + share_N * ((silu(gate) * up) @ down[expert].T)
    dense_NH.backward(layer.upstream_NH.double())
    pairs = [(out_NH.detach(), dense_NH.detach()), (layer.hidden_NH.grad, x_NH.grad)]
    pairs.append((layer.scores_NE.grad, scores_NE.grad))
    local = shape["experts"] // ranks.size
    own = slice(ranks.rank * local, (ranks.rank + 1) * local)
    for full, mine in ((gate_up, layer.weights.gate_up_EGH), (down, layer.weights.down_EHI)):
        assert full.grad is not None
        total = full.grad.clone()
        ranks.all_reduce(total)
        pairs.append((mine.grad, total[own]))
    return [
        relative_error(found, expected)
        for found, expected in pairs
        if found is not None and expected is not None
    ]


def _launch(shape: Shape, config: Config, provider: str) -> DispatchLaunch:
    from operators.dispatch_launch import DispatchLaunch

    schedule: Any = config.get("dispatch_schedule", "serial")
    return DispatchLaunch.for_chunks(
        int(config.get("chunks", 1)),
        shape["tokens_per_rank"],
        dispatch_schedule=schedule,
        min_rows=shape["min_rows"],
        migrate=provider != "standard_ep",
        backward="nested" if provider == "nested" else "chunked",
    )


def _routing(shape: Shape, tokens: int, rank: int, ranks: int, device: str) -> Routing:
    from operators.routing import profile

    return profile(
        shape["profile"], tokens, shape["experts"], shape["top_k"], rank, ranks=ranks, device=device
    )


ADAPTER = PipelinedLlepAdapter()
