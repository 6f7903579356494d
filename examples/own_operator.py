"""An operator of one's own in a sweep: a row-parallel linear layer whose partial sums are all-reduced in chunks.

    flatpeak sweep examples/own_operator.yaml

Every rank holds H/P columns of the input and as many rows of the weight; the outputs of all ranks are added up. In
chunks the partial sums of only two are there at a time beside the output. What follows is all that flatpeak needs
to know: shape, knobs, bound, how one configuration is built and run, and that its results are right.

Legend: N tokens, F outputs, S = H/P inputs of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tuner.operators.common import (
    SCALAR_BYTES,
    TOLERANCE,
    check_divides,
    check_dtype,
    normal,
    relative_error,
)
from tuner.registry import Runnable, Shape, check_keys, check_provider
from tuner.space import Config, Knob, Space

if TYPE_CHECKING:  # torch is loaded where tensors are made: planners and pages list sweeps without it
    from torch import Tensor

    from operators.ranks import Ranks

_CHECKED = {"tokens": 64, "hidden": 48, "outputs": 32}


class RowParallelLinear:
    """Shape: ``tokens``, ``hidden``, ``outputs``, ``dtype``. Knob: ``chunks``."""

    name = "row_parallel_linear"
    version = 1
    providers = ("flatpeak",)
    has_peers = True
    multiplies = True

    def shape(self, given: Mapping[str, Any], ranks: int) -> Shape:
        shape = check_keys(
            self.name, given, {"tokens": int, "hidden": int, "outputs": int}, {"dtype": "float32"}
        )
        check_dtype(self.name, shape["dtype"])
        check_divides("hidden", shape["hidden"], ranks)
        return shape

    def space(self, shape: Shape, ranks: int, provider: str) -> Space:
        del shape, ranks
        check_provider(self, provider)
        return Space((Knob("chunks", (1, 2, 4, 8), "ordered"),))

    def canonical(self, shape: Shape, config: Config, ranks: int) -> Config:
        del ranks
        return {"chunks": min(int(config["chunks"]), shape["tokens"])}

    def bound_bytes(self, shape: Shape, config: Config, ranks: int, provider: str) -> dict[str, int]:
        del provider
        scalar, mine = SCALAR_BYTES[shape["dtype"]], shape["hidden"] // ranks
        chunks = int(config["chunks"])
        rows = min(chunks, 2) * -(
            -shape["tokens"] // chunks
        )  # the last chunk is there while the next is made
        return {
            "weights_grads": scalar * mine * shape["outputs"],
            "inputs_outputs": scalar * shape["tokens"] * (mine + shape["outputs"]),
            "partial_sums": scalar * rows * shape["outputs"],
        }

    def build(self, shape: Shape, config: Config, ranks: Ranks, device: str, provider: str) -> Runnable:
        del provider
        mine = shape["hidden"] // ranks.size
        drawn = {"dtype": shape["dtype"], "device": device}
        input_NS = normal(shape["tokens"], mine, seed=2 * ranks.rank, **drawn)
        weight_SF = normal(mine, shape["outputs"], seed=2 * ranks.rank + 1, **drawn)
        output_NF = input_NS.new_empty(shape["tokens"], shape["outputs"])
        chunks = int(config["chunks"])
        return Runnable(
            {"forward": lambda: _forward(input_NS, weight_SF, output_NF, chunks, ranks)},
            held=(input_NS, weight_SF, output_NF),
        )

    def reference_check(
        self, shape: Shape, config: Config, ranks: Ranks, device: str, provider: str
    ) -> tuple[float, float]:
        del config
        small = {**_CHECKED, "hidden": _CHECKED["hidden"] * ranks.size, "dtype": shape["dtype"]}
        run = self.build(small, {"chunks": 3}, ranks, device, provider)
        run.forward_backward()
        input_NS, weight_SF, output_NF = run.held
        whole_NF = input_NS.double() @ weight_SF.double()
        ranks.all_reduce(whole_NF)
        return relative_error(output_NF, whole_NF), TOLERANCE[shape["dtype"]]


def _forward(input_NS: Tensor, weight_SF: Tensor, output_NF: Tensor, chunks: int, ranks: Ranks) -> None:
    rows = -(-input_NS.shape[0] // chunks)
    for start in range(0, input_NS.shape[0], rows):
        part_CF = input_NS[start : start + rows] @ weight_SF
        ranks.all_reduce(part_CF)
        output_NF[start : start + rows] = part_CF


ADAPTER = RowParallelLinear()
