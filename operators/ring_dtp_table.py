"""What the ranks of a head must know of each other, exchanged once a call.

One small all-gather and one wait of the host give every rank the same table: rows of hidden states and of
weights, how many targets count, and whether anybody's input breaks a rule. So sizes of all later hops are
known in advance, the choice of mode is the same everywhere, and an error is raised on all ranks instead of
leaving the others in a collective.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from operators.errors import RuleError
from operators.kernels.strip import has_data
from operators.ranks import Ranks
from operators.vocab_shards import VocabShards

_RULES = (
    (
        "hidden states and the weight shard are matrices [N, H] and [V_r, H] of one dtype",
        "Flatten batch and sequence, and cast both to one dtype.",
    ),
    (
        "dtype is bfloat16, float32 or float64",
        "Cast hidden states and weights; fp16 gradients would underflow.",
    ),
    ("targets are int64 or int32 of shape [N], one per row of hidden", "Flatten the targets like hidden."),
    ("bias is None or [V_r], of the weights' dtype or fp32", "Shard the bias like the weights' rows."),
    (
        "hidden states, weights, targets and bias lie on one device",
        "Move all of them to the device of hidden.",
    ),
)
_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
# columns of the table; those from _AGREED on must be the same on all ranks
_PROBLEM, _TOKENS, _ROWS, _COUNTED, _BEYOND, _LAST, _AGREED = range(7)
_AGREED_NAMES = (
    "hidden width",
    "dtype",
    "bias and its dtype",
    "gradients wanted",
    "mode and options",
    "token_count",
)


@dataclass(frozen=True, slots=True)
class HeadTable:
    """Sizes of every rank of the group, in rank order."""

    tokens: tuple[int, ...]
    shards: VocabShards
    counted: int
    """Targets of all ranks that are not ignored."""


def exchange_table(
    ranks: Ranks,
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    *,
    ignore_index: int,
    options: int,
    token_count: int | None,
) -> HeadTable:
    """Exchange and check the table. One host synchronisation (none for tensors without data).

    Args:
        options: a number that stands for everything else that must agree (mode, reduction, …).

    Raises:
        RuleError: on every rank, if any rank's input breaks a rule or the ranks disagree.
    """
    problem = _first_problem(hidden_NH, weight_VH, bias_V, targets_N)
    if not has_data(hidden_NH):
        _raise_problem(ranks.rank, problem)
        return HeadTable(
            tokens=(hidden_NH.shape[0],) * ranks.size,
            shards=VocabShards((weight_VH.shape[0],) * ranks.size),
            counted=hidden_NH.shape[0] * ranks.size,
        )
    mine = torch.zeros(_AGREED + len(_AGREED_NAMES), dtype=torch.int64)
    mine[_PROBLEM] = problem
    if not problem:
        mine[_TOKENS], mine[_ROWS] = hidden_NH.shape[0], weight_VH.shape[0]
        grads = [t is not None and t.requires_grad for t in (hidden_NH, weight_VH, bias_V)]
        wanted = sum(1 << i for i, on in enumerate(grads) if on) if torch.is_grad_enabled() else 0
        agreed = [
            hidden_NH.shape[1],
            _DTYPES.index(hidden_NH.dtype),
            0 if bias_V is None else 1 + _DTYPES.index(bias_V.dtype),
        ]
        agreed += [wanted, options, -1 if token_count is None else token_count]
        mine[_AGREED:] = torch.tensor(agreed)
    mine = mine.to(hidden_NH.device, non_blocking=True)
    if not problem and targets_N.numel():
        counted = targets_N != ignore_index
        mine[_COUNTED] = counted.sum()
        mine[_BEYOND] = (counted & (targets_N < 0)).sum()
        mine[_LAST] = torch.where(counted, targets_N, -1).max()
    rows = ranks.all_gather(mine).tolist()
    _check(rows)
    table = HeadTable(
        tokens=tuple(row[_TOKENS] for row in rows),
        shards=VocabShards.of([row[_ROWS] for row in rows]),
        counted=sum(row[_COUNTED] for row in rows),
    )
    for rank, row in enumerate(rows):
        if row[_BEYOND] or (row[_TOKENS] and row[_LAST] >= table.shards.vocab):
            raise RuleError(
                rule=f"a target is ignore_index ({ignore_index}) or in [0, {table.shards.vocab})",
                value=f"rank {rank}: {row[_BEYOND]} negative, largest {row[_LAST]}",
                remedy="Check the tokenizer against the vocabulary the shards add up to.",
            )
    return table


def _first_problem(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> int:
    """1 + index of the first broken rule, or 0."""
    matrices = hidden.dim() == 2 and weight.dim() == 2
    if not (matrices and hidden.shape[1] == weight.shape[1] and hidden.dtype == weight.dtype):
        return 1
    if hidden.dtype not in _DTYPES:
        return 2
    if targets.dtype not in (torch.int64, torch.int32) or targets.shape != hidden.shape[:1]:
        return 3
    if bias is not None and (
        bias.shape != weight.shape[:1] or bias.dtype not in (weight.dtype, torch.float32)
    ):
        return 4
    devices = {t.device for t in (hidden, weight, targets, bias) if t is not None}
    return 0 if len(devices) == 1 else 5


def _raise_problem(rank: int, problem: int) -> None:
    if problem:
        rule, remedy = _RULES[problem - 1]
        raise RuleError(rule=rule, value=f"rank {rank}'s inputs", remedy=remedy)


def _check(rows: list[list[int]]) -> None:
    for rank, row in enumerate(rows):
        _raise_problem(rank, row[_PROBLEM])
    for at, name in enumerate(_AGREED_NAMES):
        values = [row[_AGREED + at] for row in rows]
        if len(set(values)) > 1:
            raise RuleError(
                rule=f"all ranks of the vocabulary group agree on: {name}",
                value=values,
                remedy="Call the head with the same options on every rank, also on one without tokens.",
            )
