"""SCO on a stack of checkpointed blocks, and keeping every boundary."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from operators.bounds.checkpoint_offload import (
    boundary_bytes,
    checkpoint_offload_terms,
    locked_bytes,
    offloaded_count,
)
from tuner.operators.common import (
    SCALAR_BYTES,
    TOLERANCE,
    check_dtype,
    drop_gradients,
    normal,
    relative_error,
    worst,
)
from tuner.registry import Runnable, Shape, check_keys
from tuner.space import Config, Knob, Space

if TYPE_CHECKING:
    from torch import Tensor

    from operators.checkpoint_offload import OffloadSession
    from operators.ranks import Ranks


class CheckpointOffloadAdapter:
    """A stack of gated MLP blocks, each checkpointed.

    Shape: ``tokens_per_rank``, ``hidden``, ``boundaries`` (blocks), ``intermediate`` (default: H), ``dtype``. Knob:
    ``host_budget_bytes`` (locked bytes of a rank). Providers: ``flatpeak``; ``keep``, every boundary stays.
    """

    name = "checkpoint_offload"
    version = 1
    providers = ("flatpeak", "keep")
    has_peers, multiplies = False, True

    def shape(self, given: Mapping[str, Any], ranks: int) -> Shape:
        del ranks
        required = dict.fromkeys(("tokens_per_rank", "hidden", "boundaries"), int)
        optional = {"intermediate": given.get("hidden", 1), "dtype": "float32"}
        shape = check_keys(self.name, given, required, optional)
        check_dtype(self.name, shape["dtype"])
        return shape

    def space(self, shape: Shape, ranks: int, provider: str) -> Space:
        del ranks
        if provider == "keep":
            return Space(())
        most = shape["boundaries"] - 1
        counts = sorted({0, most // 4, most // 2, 3 * most // 4, most})
        one = locked_bytes(boundary_bytes=_boundary(shape), offloaded=1)
        return Space((Knob("host_budget_bytes", tuple(n * one for n in counts), "ordered"),))

    def canonical(self, shape: Shape, config: Config, ranks: int) -> Config:
        """Budgets that lock the same boundaries are one point."""
        del ranks
        if "host_budget_bytes" not in config:
            return config
        count = _offloaded(shape, config)
        return config | {"host_budget_bytes": locked_bytes(boundary_bytes=_boundary(shape), offloaded=count)}

    def bound_bytes(self, shape: Shape, config: Config, ranks: int, provider: str) -> dict[str, int]:
        del ranks, provider
        scalar = SCALAR_BYTES[shape["dtype"]]
        tokens, hidden, inner = shape["tokens_per_rank"], shape["hidden"], shape["intermediate"]
        terms = checkpoint_offload_terms(
            tokens=tokens,
            hidden=hidden,
            boundaries=shape["boundaries"],
            offloaded=_offloaded(shape, config),
            scalar_bytes=scalar,
        )
        weights = 2 * scalar * shape["boundaries"] * 3 * hidden * inner
        # one block recomputed with its gradients: eight tensors as wide as the block inside, five as outside
        block = scalar * tokens * (8 * inner + 5 * hidden) + scalar * 3 * hidden * inner
        ends = 3 * scalar * tokens * hidden  # the input, its gradient, and the gradient that comes in
        return terms | {"weights_grads": weights, "block": block, "inputs_outputs": ends}

    def build(self, shape: Shape, config: Config, ranks: Ranks, device: str, provider: str) -> Runnable:
        del provider
        stack = _Stack(shape, ranks.rank, device)
        session = _session(shape, config, ranks, device)
        outputs: list[Tensor] = []

        def forward() -> None:
            with session:
                outputs.append(stack.forward())

        def backward() -> None:
            outputs.pop().backward(stack.upstream_NH)

        def reset() -> None:
            outputs.clear()
            drop_gradients(stack.input_NH, *stack.weights)

        held = (stack.input_NH, stack.upstream_NH, *stack.weights)
        locked = session.report().locked_bytes
        return Runnable({"forward": forward, "backward": backward}, held, reset, host_locked_bytes=locked)

    def reference_check(
        self, shape: Shape, config: Config, ranks: Ranks, device: str, provider: str
    ) -> tuple[float, float]:
        """Bit for bit against the same stack without a session: the tolerance is zero."""
        del provider
        problem = {**shape, "tokens_per_rank": 16, "hidden": 8, "intermediate": 12}
        # as many boundaries go to the host as in the real problem
        share = locked_bytes(boundary_bytes=_boundary(problem), offloaded=_offloaded(shape, config))
        session = _session(problem, {"host_budget_bytes": share}, ranks, device, min_bytes=1)
        kept, offloaded = _Stack(problem, ranks.rank, device), _Stack(problem, ranks.rank, device)
        expected_NH = kept.forward()
        with session:
            found_NH = offloaded.forward()
        expected_NH.backward(kept.upstream_NH)
        found_NH.backward(offloaded.upstream_NH)
        sent = session.report().offloaded
        session.close()
        pairs = [(found_NH.detach(), expected_NH.detach())]
        leaves = zip((offloaded.input_NH, *offloaded.weights), (kept.input_NH, *kept.weights), strict=True)
        pairs += [(a.grad, b.grad) for a, b in leaves if a.grad is not None and b.grad is not None]
        errors = [relative_error(found, expected) for found, expected in pairs]
        if sent != _offloaded(shape, config):
            return math.inf, 0.0
        exact = 0.0 if device == "cpu" else TOLERANCE[shape["dtype"]]
        return worst(errors), exact


class _Stack:
    """Blocks ``x + down(silu(gate(x)) * up(x))``, checkpointed one by one."""

    def __init__(self, shape: Shape, rank: int, device: str) -> None:
        tokens, hidden, inner = shape["tokens_per_rank"], shape["hidden"], shape["intermediate"]
        dtype = shape["dtype"]

        def weight(rows: int, columns: int, seed: int, size: float = 1.0) -> Tensor:
            scale = size * columns**-0.5
            return normal(rows, columns, seed=seed, dtype=dtype, device=device, scale=scale).requires_grad_()

        self.weights: list[Tensor] = []
        for block in range(shape["boundaries"]):
            # nothing normalises between blocks: at full size the product of gate and up would square x in each
            down = weight(hidden, inner, 2 * block + 1, size=0.1)
            self.weights += [weight(2 * inner, hidden, 2 * block), down]
        self.input_NH = normal(tokens, hidden, seed=1001 + rank, dtype=dtype, device=device).requires_grad_()
        self.upstream_NH = normal(tokens, hidden, seed=2001 + rank, dtype=dtype, device=device)

    def forward(self) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        x_NH = self.input_NH + 0  # the first boundary is made, as an embedding makes it; a leaf would stay
        for block in range(0, len(self.weights), 2):
            x_NH = checkpoint(_block, x_NH, *self.weights[block : block + 2], use_reentrant=False)
        return x_NH


def _block(x_NH: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    from torch.nn.functional import silu

    gate, up = (x_NH @ gate_up.T).chunk(2, dim=1)
    out_NH: Tensor = x_NH + (silu(gate) * up) @ down.T
    return out_NH


def _boundary(shape: Shape) -> int:
    return boundary_bytes(
        tokens=shape["tokens_per_rank"], hidden=shape["hidden"], scalar_bytes=SCALAR_BYTES[shape["dtype"]]
    )


def _offloaded(shape: Shape, config: Config) -> int:
    return offloaded_count(
        boundary_bytes=_boundary(shape),
        boundaries=shape["boundaries"],
        host_budget_bytes=int(config.get("host_budget_bytes", 0)),
    )


def _session(
    shape: Shape, config: Config, ranks: Ranks, device: str, *, min_bytes: int | None = None
) -> OffloadSession:
    from operators.checkpoint_offload import OffloadSession

    boundary = _boundary(shape)
    return OffloadSession(
        int(config.get("host_budget_bytes", 0)),
        ranks=ranks,
        boundary_bytes=boundary,
        boundaries=shape["boundaries"],
        device=device,
        min_bytes=boundary if min_bytes is None else min_bytes,
    )


ADAPTER = CheckpointOffloadAdapter()
