"""OffloadStreamAdamW's engines, and torch's own optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from operators.bounds.stream_adamw import stream_adamw_terms
from tuner.operators.common import (
    SCALAR_BYTES,
    block_slack,
    check_dtype,
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

_CHECK_PARAMS, _CHECK_STEPS, _LR = 1000, 3, 1e-2
# Masters are rounded to bf16 weights: one unit in the last place. In fp32 fused and plain updates differ in theirs.
_TOLERANCE = {"bfloat16": 8e-3, "float32": 1e-5}


class StreamAdamwAdapter:
    """One optimizer step.

    Shape: ``params`` (of the rank), ``tensors`` they are spread over, ``dtype`` (float32 or bfloat16). Knobs:
    ``engine``, ``bucket_params``, ``staging_slots``, ``host_share`` (engine split only). Providers:
    ``flatpeak``; ``torch``, ``torch.optim.AdamW`` on fp32 masters; ``host``, the host engine.
    """

    name = "stream_adamw"
    version = 3
    providers = ("flatpeak", "torch", "host")
    has_peers, multiplies = False, False

    def shape(self, given: Mapping[str, Any], ranks: int) -> Shape:
        del ranks
        shape = check_keys(
            self.name, given, {"params": int}, {"dtype": "float32", "tensors": 4}, {"tensors": 100_000}
        )
        check_dtype(self.name, shape["dtype"], tuple(_TOLERANCE))
        return shape

    def space(self, shape: Shape, ranks: int, provider: str) -> Space:
        del ranks
        if provider == "torch":
            return Space(())
        largest = shape["params"]
        buckets = Knob("bucket_params", powers_of_two(max(64, largest // 64), largest), "ordered")
        slots = Knob("staging_slots", (1, 2, 3, 4), "ordered")
        if provider == "host":
            return Space((buckets, slots))
        return Space(
            (
                Knob("engine", ("stream", "host", "split", "device")),
                Knob("bucket_params", buckets.values, "ordered"),
                slots,
                Knob("host_share", (0.25, 0.4, 0.5, 0.6, 0.75), "ordered", {"engine": ("split",)}),
            )
        )

    def canonical(self, shape: Shape, config: Config, ranks: int) -> Config:
        del ranks
        one = dict(config)
        if "bucket_params" in one:
            one["bucket_params"] = min(int(one["bucket_params"]), shape["params"])
        return one

    def bound_bytes(self, shape: Shape, config: Config, ranks: int, provider: str) -> dict[str, int]:
        del ranks
        params, scalar = shape["params"], SCALAR_BYTES[shape["dtype"]]
        weights = {"weights_grads": 2 * scalar * params}
        sizes = _sizes(shape)
        if provider == "torch":
            # master, two moments, and the gradient in fp32
            held = [scalar * n for n in 2 * sizes] + [4 * n for n in 4 * sizes]
            state = {"optimizer_state": 12 * params, "optimizer_staging": 4 * params}
            return weights | state | {"allocator_slack": block_slack(*held)}
        terms = stream_adamw_terms(
            params=_padded(shape),
            bucket_params=int(config["bucket_params"]),
            staging_slots=int(config["staging_slots"]),
            engine=str(config.get("engine", "host")),
            host_share=float(config.get("host_share", 0.0)),
        )
        slack = block_slack(*(scalar * n for n in 2 * sizes), *terms.values())
        return weights | terms | {"allocator_slack": slack}

    def build(self, shape: Shape, config: Config, ranks: Ranks, device: str, provider: str) -> Runnable:
        weights = _weights(shape, ranks.rank, device)
        step = _Step(weights, config, provider)
        held = (*weights, *(w.grad for w in weights if w.grad is not None), *step.held)
        return Runnable(
            {"step": step}, held, held_bytes=step.device_bytes, host_locked_bytes=step.host_locked_bytes
        )

    def reference_check(
        self, shape: Shape, config: Config, ranks: Ranks, device: str, provider: str
    ) -> tuple[float, float]:
        """Weights after some steps against ``torch.optim.AdamW`` in float64."""
        import torch

        problem = {**shape, "params": _CHECK_PARAMS}
        small = dict(config)
        if "bucket_params" in small:
            small["bucket_params"] = max(64, _CHECK_PARAMS * int(small["bucket_params"]) // shape["params"])
        weights = _weights(problem, ranks.rank, device)
        expected = [torch.nn.Parameter(w.detach().double()) for w in weights]
        for one, other in zip(weights, expected, strict=True):
            assert one.grad is not None
            other.grad = one.grad.double()
        reference = torch.optim.AdamW(expected, lr=_LR)
        step = _Step(weights, small, provider)
        for _ in range(_CHECK_STEPS - step.taken):
            step()
        for _ in range(_CHECK_STEPS):
            reference.step()
        errors = [relative_error(w.detach(), e.detach()) for w, e in zip(weights, expected, strict=True)]
        return worst(errors), _TOLERANCE[shape["dtype"]]


class _Step:
    """One update, awaited to its end; the write-back belongs to it."""

    def __init__(self, weights: list[Tensor], config: Config, provider: str) -> None:
        self.held: tuple[Tensor, ...] = ()
        self.device_bytes = self.host_locked_bytes = self.taken = 0
        self._run = self._torch(weights) if provider == "torch" else self._ours(weights, config)

    def __call__(self) -> None:
        self._run()

    def _ours(self, weights: list[Tensor], config: Config) -> Callable[[], None]:
        from operators.stream_adamw import OffloadStreamAdamW

        engine: Any = config.get("engine", "host")
        optimizer = OffloadStreamAdamW(
            weights,
            lr=_LR,
            engine=engine,
            bucket_params=int(config["bucket_params"]),
            staging_slots=int(config["staging_slots"]),
            host_share=float(config.get("host_share", 0.0)),
        )
        # its own tensors on the device: what it holds, not what a formula says
        self.device_bytes = optimizer.staging_bytes + (
            12 * optimizer.flat_params if engine == "device" else 0
        )
        self.host_locked_bytes = optimizer.host_bytes

        def run() -> None:
            optimizer.step()
            optimizer.drain()

        return run

    def _torch(self, weights: list[Tensor]) -> Callable[[], None]:
        """fp32 masters beside bf16 weights, torch's fused AdamW on them."""
        import torch

        masters = [w if w.dtype == torch.float32 else torch.nn.Parameter(w.detach().float()) for w in weights]
        optimizer = torch.optim.AdamW(masters, lr=_LR, fused=True)

        def run() -> None:
            with torch.no_grad():
                for weight, master in zip(weights, masters, strict=True):
                    if weight is not master and weight.grad is not None:
                        master.grad = weight.grad.float()
                optimizer.step()
                for weight, master in zip(weights, masters, strict=True):
                    if weight is not master:
                        weight.copy_(master)
                        master.grad = None

        run()  # moments are made by the first step
        self.taken = 1
        moments = [t for state in optimizer.state.values() for t in state.values()]
        self.held = tuple(t for t in (*masters, *moments) if all(t is not w for w in weights))
        return run


def _weights(shape: Shape, rank: int, device: str) -> list[Tensor]:
    """Parameters with gradients, cut into tensors of nearly equal size."""
    import torch

    made: list[Tensor] = []
    for i, n in enumerate(_sizes(shape)):
        weight = torch.nn.Parameter(normal(n, seed=100 * rank + i, dtype=shape["dtype"], device=device))
        weight.grad = normal(n, seed=5000 + 100 * rank + i, dtype=shape["dtype"], device=device)
        made.append(weight)
    return made


def _sizes(shape: Shape) -> list[int]:
    """Elements of each tensor."""
    params, tensors = shape["params"], min(shape["tensors"], shape["params"])
    return [(i + 1) * params // tensors - i * params // tensors for i in range(tensors)]


def _padded(shape: Shape) -> int:
    """Tensors are laid end to end, each rounded up to 64 elements."""
    return sum(-(-n // 64) * 64 for n in _sizes(shape))


ADAPTER = StreamAdamwAdapter()
