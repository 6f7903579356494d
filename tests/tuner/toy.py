"""An operator of one's own, given to sweeps as ``tests.tuner.toy:ADAPTER``: it does what its knobs say."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from operators.ranks import Ranks
from tuner.registry import Runnable, Shape, check_keys
from tuner.space import Config, Knob, Space

NAME = "tests.tuner.toy:ADAPTER"
MIB = 2**20


class ToyAdapter:
    """Shape: ``log``, a file that gets a line a launch; ``pause_ms`` of one repetition. Knobs: ``n``, ``act``."""

    name = "toy"
    version = 7
    providers = ("flatpeak", "other")
    has_peers, multiplies = True, False

    def shape(self, given: Mapping[str, Any], ranks: int) -> Shape:
        return check_keys(self.name, given, {"log": str}, {"pause_ms": 1})

    def space(self, shape: Shape, ranks: int, provider: str) -> Space:
        acts = ("ok", "raise", "kill", "hang", "oom", "wrong", "idle", "vague")
        return Space((Knob("n", (1, 2), "ordered"), Knob("act", acts)))

    def canonical(self, shape: Shape, config: Config, ranks: int) -> Config:
        return config

    def bound_bytes(self, shape: Shape, config: Config, ranks: int, provider: str) -> dict[str, int]:
        return {"rows": int(config["n"]) * MIB, "fixed": MIB}

    def build(self, shape: Shape, config: Config, ranks: Ranks, device: str, provider: str) -> Runnable:
        act = config["act"]
        if ranks.rank == 0:
            with Path(shape["log"]).open("a") as log:
                log.write(f"{config['n']} {act}\n")
        rows = torch.ones(int(config["n"]) * MIB // 4)

        def run() -> None:
            time.sleep(shape["pause_ms"] / 1000 * int(config["n"]))
            if ranks.rank == 1:
                _do(str(act))
            ranks.all_reduce(rows[:1])

        return Runnable({} if act == "idle" else {"forward": run}, held=(rows,))

    def reference_check(
        self, shape: Shape, config: Config, ranks: Ranks, device: str, provider: str
    ) -> tuple[float, float]:
        return (1.0 if config["act"] == "wrong" else 0.0), math.nan if config["act"] == "vague" else 0.5


def _do(act: str) -> None:
    if act == "raise":
        raise ValueError("the toy is broken")
    if act == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "hang":
        time.sleep(3600)
    if act == "oom":
        raise MemoryError


ADAPTER = ToyAdapter()
