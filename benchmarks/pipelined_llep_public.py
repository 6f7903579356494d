"""The public LLEP implementation, called from a checkout that the user names: nothing of it is in this project.

    git clone https://github.com/SalesforceAIResearch/LeastLoadedEP
    python -m benchmarks.pipelined_llep_public --llep-checkout LeastLoadedEP

It needs a process group, so it runs in a group of one here: all experts are local, nothing migrates, and what is
compared is the handling of rows and the experts' math (gpt-oss's gate with biases, the only one it has), both with
activations kept and inside a layer checkpoint.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from operators.dispatch_launch import DispatchLaunch
from operators.expert_mlp import ExpertWeights
from operators.kernels.swiglu import GPT_OSS
from operators.pipelined_llep import pipelined_llep
from operators.ranks import ProcessRanks
from operators.routing import Routing, profile


def public_forward(checkout: Path) -> Callable[..., Tensor]:
    """``gptoss_llep_forward`` of the checkout. Of transformers it needs the logger only; a stand-in will do."""
    sys.path.insert(0, str(checkout))
    if importlib.util.find_spec("transformers") is None:
        package, utils = ModuleType("transformers"), ModuleType("transformers.utils")
        names = ModuleType("transformers.utils.logging")
        silent: Any = logging.getLogger("llep")
        silent.warning_once = silent.debug
        names.get_logger = lambda _: silent  # type: ignore[attr-defined]
        utils.logging = names  # type: ignore[attr-defined]
        sys.modules |= {"transformers": package, "transformers.utils": utils}
    found: Callable[..., Tensor] = importlib.import_module("llep.gpt_oss_llep").gptoss_llep_forward
    return found


def layers(
    forward: Callable[..., Tensor],
    x: Tensor,
    scores: Tensor,
    routing: Routing,
    own: ExpertWeights,
    *,
    chunks: int,
) -> dict[str, Callable[[], Tensor]]:
    """Theirs and ours on the same inputs; theirs keeps weights in x out, so it gets transposed views."""
    up, down, up_bias, down_bias = own
    experts = routing.experts
    ranks = ProcessRanks()
    launch = DispatchLaunch.for_chunks(chunks, x.shape[0])

    def theirs(h: Tensor, s: Tensor) -> Tensor:
        args = (
            h.unsqueeze(0),
            routing.ids_NK,
            s,
            up.transpose(1, 2),
            up_bias,
            down.transpose(1, 2),
            down_bias,
        )
        out = forward(*args, experts, experts, dist.group.WORLD, limit=GPT_OSS.limit, alpha=GPT_OSS.alpha)
        return out.squeeze(0)

    def again() -> Tensor:
        out: Tensor = checkpoint(theirs, x, scores, use_reentrant=False)
        return out

    return {
        "public LLEP": lambda: theirs(x, scores),
        "public LLEP, recomputed": again,
        f"flatpeak K={chunks}": lambda: pipelined_llep(
            x, scores, routing, own, ranks=ranks, launch=launch, gate=GPT_OSS
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llep-checkout", type=Path, required=True)
    for name, default in {
        "tokens": 32_768,
        "hidden": 2880,
        "intermediate": 2880,
        "experts": 16,
        "top-k": 4,
        "chunks": 8,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device, dtype = (
        (torch.device("cuda", 0), torch.bfloat16) if cuda else (torch.device("cpu"), torch.float32)
    )
    store = tempfile.mkdtemp(prefix="group") + "/store"
    dist.init_process_group("nccl" if cuda else "gloo", init_method=f"file://{store}", rank=0, world_size=1)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(*size, generator=generator, device=device, dtype=dtype)
        return drawn.mul_(scale).requires_grad_()

    x, grad = normal(args.tokens, args.hidden), normal(args.tokens, args.hidden).detach()
    own = ExpertWeights(
        normal(args.experts, 2 * args.intermediate, args.hidden, scale=args.hidden**-0.5),
        normal(args.experts, args.hidden, args.intermediate, scale=args.intermediate**-0.5),
        normal(args.experts, 2 * args.intermediate),
        normal(args.experts, args.hidden),
    )
    routing = profile("random", args.tokens, args.experts, args.top_k, device=device)
    scores = torch.rand(
        args.tokens, args.experts, generator=generator, device=device, dtype=dtype
    ).requires_grad_()
    leaves = [x, scores, *(w for w in own if w is not None)]
    first: list[Tensor] | None = None
    for name, layer in layers(
        public_forward(args.llep_checkout), x, scores, routing, own, chunks=args.chunks
    ).items():
        times, peak = [], 0
        for repeat in range(5):
            for leaf in leaves:
                leaf.grad = None
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            y = layer()
            y.backward(grad)
            if cuda:
                torch.cuda.synchronize()
                peak = torch.cuda.max_memory_allocated()
            if repeat > 1:
                times.append(time.perf_counter() - start)
            kept = [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
            del y
        first = first or kept
        apart = max(float((a - b).norm() / b.norm()) for a, b in zip(kept, first, strict=True))
        del kept
        print(
            f"{name:24} {1e3 * statistics.median(times):8.2f} ms {peak / 2**30:7.3f} GiB, "
            f"relative difference to the first {apart:.1e}"
        )
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
