"""An operator of sixty points, of which four misbehave, each in its own way: ``tests.tuner.chaos_adapter:ADAPTER``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from operators.ranks import Ranks
from tuner.registry import Runnable, Shape, check_keys
from tuner.space import Config, Knob, Space

NAME = "tests.tuner.chaos_adapter:ADAPTER"
# The one that hangs does so for the whole stall timer and comes late: earlier, all blows can fall on it, and a trial
# that is lost four times ends as that (a rule with tests of its own), not as what it is.
RAISES, FILLS_HOST, FILLS_DEVICE, HANGS = 7, 12, 19, 45
ODD = {
    RAISES: ("failed", "raised", "point 7 cannot be"),
    FILLS_HOST: ("infeasible", "host_oom", "memory"),
    FILLS_DEVICE: ("infeasible", "device_oom", "Tried to allocate 80.00 GiB"),
    HANGS: ("failed", "stalled", "no progress"),
}
LIMIT_BYTES = 2**20
# more than the limit and the slack that a rank gets beside it
_TOO_MUCH_BYTES = 2**30


class ChaosAdapter:
    """Shape: ``log``, a file that gets a line a launch; ``pause_ms`` of one repetition. Knobs: ``point``, ``round``."""

    name = "chaos"
    version = 1
    providers = ("flatpeak",)
    has_peers, multiplies = True, False

    def shape(self, given: Mapping[str, Any], ranks: int) -> Shape:
        return check_keys(self.name, given, {"log": str}, {"pause_ms": 10})

    def space(self, shape: Shape, ranks: int, provider: str) -> Space:
        return Space((Knob("point", tuple(range(60)), "ordered"), Knob("round", (0,), "ordered")))

    def canonical(self, shape: Shape, config: Config, ranks: int) -> Config:
        return config

    def bound_bytes(self, shape: Shape, config: Config, ranks: int, provider: str) -> dict[str, int]:
        return {"rows": 4096}

    def build(self, shape: Shape, config: Config, ranks: Ranks, device: str, provider: str) -> Runnable:
        point = int(config["point"])
        if ranks.rank == 0:
            with Path(shape["log"]).open("a") as log:
                log.write(f"{point}\n")
        rows = torch.ones(1024)

        def run() -> None:
            time.sleep(shape["pause_ms"] / 1000)
            if ranks.rank == 1:
                _misbehave(point)
            ranks.all_reduce(rows[:1])

        return Runnable({"forward": run}, held=(rows,))

    def reference_check(
        self, shape: Shape, config: Config, ranks: Ranks, device: str, provider: str
    ) -> tuple[float, float]:
        return 0.0, 0.5


def _misbehave(point: int) -> None:
    if point == RAISES:
        raise ValueError("point 7 cannot be")
    if point == FILLS_HOST:
        torch.ones(_TOO_MUCH_BYTES, dtype=torch.uint8)
    if point == FILLS_DEVICE:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB.")
    if point == HANGS:
        time.sleep(3600)


ADAPTER = ChaosAdapter()
