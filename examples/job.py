"""A training job that takes its knobs from launch.json: one MoE layer, one head, one optimizer step.

    python -m examples.job launch.json                                            # starts its own ranks
    python -m torch.distributed.run --nproc-per-node 2 -m examples.job launch.json

CPU ranks over gloo, made-up tokens, the model's own sizes. N hidden rows of H, V vocabulary, E experts.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from datetime import timedelta
from math import gcd, lcm
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessExitedException, spawn
from torch.utils.checkpoint import checkpoint

from operators.checkpoint_offload import OffloadSession
from operators.dispatch_launch import DispatchLaunch
from operators.dispatch_plan import make_plan
from operators.errors import RuleError
from operators.launch import Launch, read_launch
from operators.pipelined_llep import PipelinedLLEP
from operators.ranks import ProcessRanks
from operators.ring_dtp import ring_dtp
from operators.routing import route
from operators.stream_adamw import OffloadStreamAdamW
from operators.vocab_shards import shard_interval

_BYTES_A_PARAMETER = 20  # weight, gradient, master and two moments, fp32
DEGREES = ("sequence_degree", "expert_degree", "vocab_degree")


class Model(nn.Module):
    """Embedding, one dense block (checkpointed), one expert layer, this rank's rows of the head."""

    def __init__(self, launch: Launch, experts: ProcessRanks, vocab: ProcessRanks) -> None:
        super().__init__()
        shape, self.launch, self.vocab = launch.model, launch, vocab
        hidden, start_stop = shape["hidden"], shard_interval(shape["vocab"], vocab.size, vocab.rank)
        dispatch = DispatchLaunch(
            chunk_tokens=launch.chunk_tokens,
            max_chunks=launch.max_chunks,
            dispatch_schedule=launch.dispatch_schedule,
            alpha=launch.alpha,
            min_rows=launch.min_rows,
            lambda_=launch.lambda_,
        )
        torch.manual_seed(0)  # what several ranks hold starts out equal
        self.embed = nn.Embedding(shape["vocab"], hidden)
        self.mix = nn.Linear(hidden, hidden)
        self.router = nn.Linear(hidden, shape["experts"], bias=False)
        torch.manual_seed(1 + experts.rank)
        inner = shape.get("expert_intermediate", hidden)
        self.experts = PipelinedLLEP(hidden, inner, shape["experts"], ranks=experts, launch=dispatch)
        torch.manual_seed(1 + vocab.rank)
        self.head_VH = nn.Parameter(torch.randn(start_stop[1] - start_stop[0], hidden) / hidden**0.5)
        self.most_rows = 0

    def forward(self, tokens_N: Tensor) -> Tensor:
        x_NH = checkpoint(
            lambda x: x + torch.tanh(self.mix(x)), self.embed(tokens_N[:-1]), use_reentrant=False
        )
        scores_NE = self.router(x_NH).softmax(dim=1)
        routing = route(scores_NE, self.launch.model["top_k"])
        plan = make_plan(routing, self.experts.ranks, self.experts.launch)
        self.most_rows = max(self.most_rows, plan.received_most)
        x_NH = x_NH + self.experts(x_NH, scores_NE, routing, plan)
        loss: Tensor = ring_dtp(
            x_NH,
            self.head_VH,
            tokens_N[1:],
            ranks=self.vocab,
            mode=self.launch.ring_mode,
            strip_rows=self.launch.strip_rows,
        )
        return loss  # the losses of the vocabulary group add up to its mean


def train(launch: Launch, tokens: int) -> tuple[float, float]:
    """One optimizer step on this rank; the mean loss of all ranks before and after it."""
    launch.check_tokens(tokens)
    world = ProcessRanks()
    launch = cut_to(launch, world.size, say=world.rank == 0)
    (experts, expert_copies), (vocab, head_copies) = groups(launch.expert_degree), groups(launch.vocab_degree)
    model, hidden = Model(launch, experts, vocab), launch.model["hidden"]
    session = OffloadSession(
        launch.host_budget_bytes, ranks=world, boundary_bytes=tokens * hidden * 4, boundaries=2, device="cpu"
    )
    optimizer = OffloadStreamAdamW(
        model.parameters(),
        lr=1e-2,
        engine=launch.optimizer_engine,
        bucket_params=launch.bucket_params,
        staging_slots=launch.staging_slots,
        host_share=launch.host_share,
    )
    generator = torch.Generator().manual_seed(100 + world.rank)
    batches = torch.randint(
        launch.model["vocab"], (launch.accumulation_steps, tokens + 1), generator=generator
    )
    share = vocab.size / world.size / len(batches)  # of one vocabulary group and micro-batch in the mean

    def mean_loss() -> Tensor:
        with torch.no_grad():
            total = torch.stack([model(batch) * share for batch in batches]).sum()
        world.all_reduce(total)
        return total

    before = mean_loss()
    for batch in batches:
        with session:
            loss = model(batch) * share
        loss.backward()
    for name, parameter in model.named_parameters():
        copies = {"experts": expert_copies, "head_VH": head_copies}.get(name.split(".")[0], world)
        if parameter.grad is not None:
            copies.all_reduce(parameter.grad)
    optimizer.step()
    after = mean_loss()

    report = session.report()
    mine = torch.tensor(
        [tokens, launch.chunks(tokens), model.most_rows, report.offloaded, report.locked_bytes]
    )
    rows = world.all_gather(mine)
    session.close()
    if world.rank == 0:
        print(f"loss {float(before):.6f} -> {float(after):.6f} after one step of {optimizer.engine} AdamW")
        print("rank  tokens  chunks  most rows a chunk  boundaries away  locked bytes")
        for rank, (n, k, most, away, locked) in enumerate(rows.tolist()):
            print(f"{rank:>4}  {n:>6}  {k:>6}  {most:>17}  {away:>15}  {locked:>12}")
    return float(before), float(after)


def cut_to(launch: Launch, ranks: int, *, say: bool = False) -> Launch:
    """The launch on fewer (or other) ranks than it was planned for: each degree cut to the ranks there are.

    A cut degree divides both the planned one and ``ranks``, so experts and vocabulary still divide evenly.
    What a rank holds grows with the cut: the plan's memory bound is the planned layout's.
    """
    planned = {name: getattr(launch, name) for name in DEGREES}
    cut = {name: gcd(degree, ranks) for name, degree in planned.items()}
    if say and cut != planned:
        changes = ", ".join(f"{n} {planned[n]} -> {cut[n]}" for n in DEGREES if cut[n] != planned[n])
        print(
            f"{ranks} ranks cannot hold the planned groups: {changes}; the plan's memory bound does not apply"
        )
    return replace(
        launch,
        sequence_degree=cut["sequence_degree"],
        expert_degree=cut["expert_degree"],
        vocab_degree=cut["vocab_degree"],
    )


def groups(degree: int) -> tuple[ProcessRanks, ProcessRanks]:
    """The contiguous group of ``degree`` ranks this rank is in, and the ranks with its place in the others."""
    size, rank = dist.get_world_size(), dist.get_rank()
    inside = [dist.new_group(list(range(i, i + degree))) for i in range(0, size, degree)]
    across = [dist.new_group(list(range(i, size, degree))) for i in range(degree)]
    return ProcessRanks(inside[rank // degree]), ProcessRanks(across[rank % degree])


def _rank(rank: int, store: str, size: int, path: Path, asked: tuple[int | None, float]) -> None:
    """One rank, started by ``spawn`` (``store`` is a file) or by torchrun (``store`` is empty)."""
    torch.set_num_threads(1)
    launch, (tokens, patience) = read_launch(path), asked
    try:
        wait = timedelta(seconds=patience)
        if store:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=wait
            )
        else:
            dist.init_process_group("gloo", timeout=wait)
        train(launch, min(launch.max_tokens_per_rank, 512) if tokens is None else tokens)
    except RuleError as error:
        sys.exit(_refused(error))
    except RuntimeError as error:  # a rank that never came, or went away: torch names no single class for it
        lines = str(error).strip().splitlines() or [type(error).__name__]
        missing = RuleError(
            rule=f"every rank of the job must be there and answer within {patience:g} s",
            value=lines[0][:300],
            remedy="See the first rank that ended for the cause, start all of them, or raise --timeout.",
        )
        sys.exit(_refused(missing))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def check_memory(launch: Launch, size: int) -> None:
    """Refuse what this machine's memory cannot hold: the kernel would end a rank, and nobody would say why.

    Raises:
        RuleError: weights, gradients, masters and moments of all ranks need more.
    """
    shape = launch.model
    hidden, inner = shape["hidden"], shape.get("expert_intermediate", shape["hidden"])
    mine = (
        (shape["vocab"] * (1 + 1 / launch.vocab_degree) + hidden + shape["experts"]) * hidden
        + shape["experts"] / launch.expert_degree * 3 * hidden * inner
    )  # fmt: skip
    needed = int(size * mine * _BYTES_A_PARAMETER)
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise RuleError(
            rule="weights, gradients and optimizer state of all ranks must fit this machine's memory",
            value=f"{needed / 2**30:.0f} GiB for {size} ranks, {there / 2**30:.0f} GiB here",
            remedy="Take the launch of a smaller model (demo-run/launch.json), or start fewer ranks by torchrun.",
        )


def _refused(error: RuleError) -> int:
    print(f"{error.rule}\n  got: {error.value!r}\n  remedy: {error.remedy}", file=sys.stderr)
    return 1


def main(argv: list[str] | None = None) -> int:
    """Exit 1 with rule, value and remedy if the file or the run breaks a rule."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("launch", type=Path, help="a launch.json exported from a plan")
    parser.add_argument("--tokens", type=int, help="tokens per rank; at most the planned N_max")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds to wait for the other ranks")
    options = parser.parse_args(argv)
    try:
        launch = read_launch(options.launch)
        if options.tokens is not None:
            if options.tokens < 1:
                raise RuleError(
                    rule="tokens per rank must be at least 1",
                    value=options.tokens,
                    remedy="Use for example 512.",
                )
            launch.check_tokens(options.tokens)
        if not 1 <= options.timeout <= 86400:
            raise RuleError(
                rule="--timeout is from 1 to 86400 seconds",
                value=options.timeout,
                remedy="Use for example 120.",
            )
    except RuleError as error:
        return _refused(error)
    if "RANK" in os.environ:  # started by torchrun
        _rank(0, "", 0, options.launch, (options.tokens, options.timeout))
        return 0
    size = lcm(2, launch.sequence_degree, launch.expert_degree, launch.vocab_degree)
    try:
        check_memory(launch, size)
    except RuleError as error:
        return _refused(error)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (str(Path(folder) / "store"), size, options.launch, (options.tokens, options.timeout))
        try:
            spawn(_rank, arguments, nprocs=size)
        except ProcessExitedException as error:
            if error.exit_code > 0:  # the rank has said why
                return error.exit_code
            ended = RuleError(
                rule="every rank of the job must live until its end",
                value=f"rank {error.error_index} was ended by {error.signal_name or -error.exit_code}",
                remedy="SIGKILL that nobody sent is the kernel's, for lack of memory: take a smaller model.",
            )
            return _refused(ended)
    return 0


if __name__ == "__main__":
    sys.exit(main())
