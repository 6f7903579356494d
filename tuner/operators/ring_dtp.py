"""Ring-DTP and the heads it is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from operators.bounds.ring_dtp import materialised_head_bytes, resolve_ring_mode, ring_dtp_terms
from tuner.operators.common import (
    SCALAR_BYTES,
    TOLERANCE,
    check_dtype,
    drop_gradients,
    normal,
    powers_of_two,
    relative_error,
    worst,
)
from tuner.registry import Runnable, Shape, check_keys
from tuner.space import Config, Knob, Space

if TYPE_CHECKING:
    from torch import Tensor

    from operators.ranks import Ranks

_WHOLE = ("materialised", "torch_chunked")
_CHECK_TOKENS, _CHECK_HIDDEN, _CHECK_VOCAB = 24, 16, 53


class RingDtpAdapter:
    """Shape: ``tokens_per_rank``, ``hidden``, ``vocab``, ``dtype``. Knobs: ``ring_mode``, ``strip_rows``.

    Providers: ``flatpeak``; ``materialised``, logits of the whole vocabulary; ``torch_chunked``, torch's own
    chunked loss. Both hold the whole head on every rank and talk to nobody.
    """

    name = "ring_dtp"
    version = 1
    providers = ("flatpeak", "materialised", "torch_chunked")
    has_peers, multiplies = True, True

    def shape(self, given: Mapping[str, Any], ranks: int) -> Shape:
        del ranks
        required = {"tokens_per_rank": int, "hidden": int, "vocab": int}
        shape = check_keys(self.name, given, required, {"dtype": "float32"})
        check_dtype(self.name, shape["dtype"])
        return shape

    def space(self, shape: Shape, ranks: int, provider: str) -> Space:
        del ranks
        if provider in _WHOLE:
            return Space(())
        tokens = shape["tokens_per_rank"]
        return Space(
            (
                Knob("ring_mode", ("auto", "weights", "activations", "gather")),
                Knob("strip_rows", powers_of_two(max(1, tokens // 16), tokens), "ordered"),
            )
        )

    def canonical(self, shape: Shape, config: Config, ranks: int) -> Config:
        one = dict(config)
        if one.get("ring_mode") == "auto":
            one["ring_mode"] = resolve_ring_mode(shape["tokens_per_rank"], shape["vocab"], ranks)
        if "strip_rows" in one:
            one["strip_rows"] = min(max(1, int(one["strip_rows"])), shape["tokens_per_rank"])
        return one

    def bound_bytes(self, shape: Shape, config: Config, ranks: int, provider: str) -> dict[str, int]:
        scalar = SCALAR_BYTES[shape["dtype"]]
        if provider in _WHOLE:
            # the chunked loss is bounded by the head that does not chunk; logits are fp32 whatever the dtype
            tokens, hidden, vocab = shape["tokens_per_rank"], shape["hidden"], shape["vocab"]
            peak = materialised_head_bytes(
                tokens=tokens, hidden=hidden, vocab=vocab, scalar_bytes=max(4, scalar)
            )
            return {"strips": peak, "accumulators": max(4, scalar) * hidden * (vocab + tokens)}
        return ring_dtp_terms(
            tokens=shape["tokens_per_rank"],
            hidden=shape["hidden"],
            vocab=shape["vocab"],
            vocab_ranks=ranks,
            ring_mode=str(config["ring_mode"]),
            strip_rows=int(config["strip_rows"]),
            pass_="backward",  # noqa: S106
            scalar_bytes=scalar,
        )

    def build(self, shape: Shape, config: Config, ranks: Ranks, device: str, provider: str) -> Runnable:
        import torch

        held = hidden_NH, weight_VH, _ = _inputs(shape, ranks, device, provider)
        losses: list[Tensor] = []

        def forward() -> None:
            losses.append(_loss(held, config, ranks, provider))

        def backward() -> None:
            torch.autograd.backward(losses.pop())

        def reset() -> None:
            losses.clear()
            drop_gradients(hidden_NH, weight_VH)

        return Runnable({"forward": forward, "backward": backward}, held, reset)

    def reference_check(
        self, shape: Shape, config: Config, ranks: Ranks, device: str, provider: str
    ) -> tuple[float, float]:
        from torch.nn.functional import cross_entropy

        problem = {**shape, "tokens_per_rank": _CHECK_TOKENS, "hidden": _CHECK_HIDDEN, "vocab": _CHECK_VOCAB}
        held = hidden_NH, weight_VH, targets_N = _inputs(problem, ranks, device, provider)
        small = dict(config)
        if "strip_rows" in small:
            # keep the number of tiles a token block is cut into, not the rows of one
            small["strip_rows"] = max(1, _CHECK_TOKENS * int(small["strip_rows"]) // shape["tokens_per_rank"])
        loss = _loss(held, small, ranks, provider)
        loss.backward()

        x_NH = hidden_NH.detach().double().requires_grad_()
        full_VH = _weight(problem, device).double().requires_grad_()
        # every rank's loss is its share of the group's mean; weight gradients are sums over the ranks
        total = cross_entropy(x_NH @ full_VH.T, targets_N, reduction="sum") / (_CHECK_TOKENS * ranks.size)
        total.backward()
        assert x_NH.grad is not None
        assert full_VH.grad is not None
        assert hidden_NH.grad is not None
        assert weight_VH.grad is not None
        weight_grad_VH = full_VH.grad.clone()
        if provider not in _WHOLE:
            ranks.all_reduce(weight_grad_VH)
        start, stop = _interval(_CHECK_VOCAB, ranks, provider)
        errors = [
            relative_error(loss.detach(), total.detach()),
            relative_error(hidden_NH.grad, x_NH.grad),
            relative_error(weight_VH.grad, weight_grad_VH[start:stop]),
        ]
        return worst(errors), TOLERANCE[shape["dtype"]]


Inputs = tuple["Tensor", "Tensor", "Tensor"]


def _inputs(shape: Shape, ranks: Ranks, device: str, provider: str) -> Inputs:
    import torch

    tokens, hidden, vocab = shape["tokens_per_rank"], shape["hidden"], shape["vocab"]
    hidden_NH = normal(tokens, hidden, seed=1 + ranks.rank, dtype=shape["dtype"], device=device)
    start, stop = _interval(vocab, ranks, provider)
    weight_VH = _weight(shape, device)[start:stop].clone()
    generator = torch.Generator().manual_seed(1001 + ranks.rank)
    targets_N = torch.randint(0, vocab, (tokens,), generator=generator).to(device)
    return hidden_NH.requires_grad_(), weight_VH.requires_grad_(), targets_N


def _weight(shape: Shape, device: str) -> Tensor:
    vocab, hidden = shape["vocab"], shape["hidden"]
    return normal(vocab, hidden, seed=0, dtype=shape["dtype"], device=device, scale=hidden**-0.5)


def _interval(vocab: int, ranks: Ranks, provider: str) -> tuple[int, int]:
    from operators.vocab_shards import shard_interval

    return (0, vocab) if provider in _WHOLE else shard_interval(vocab, ranks.size, ranks.rank)


def _loss(inputs: Inputs, config: Config, ranks: Ranks, provider: str) -> Tensor:
    from operators.head_baselines import materialised_head, torch_chunked_head
    from operators.ring_dtp import ring_dtp

    if provider in _WHOLE:
        # summed, and divided by everybody's tokens: this rank's share of the group's mean, as ring_dtp gives it
        head = materialised_head if provider == "materialised" else torch_chunked_head
        return head(*inputs, reduction="sum") / (inputs[0].shape[0] * ranks.size)
    mode: Any = config["ring_mode"]
    return ring_dtp(*inputs, ranks=ranks, mode=mode, strip_rows=int(config["strip_rows"]))


ADAPTER = RingDtpAdapter()
