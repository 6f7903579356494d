"""What the ranks of an expert group tell each other of a layer call before any row moves.

A rank that refuses its inputs alone leaves the others in a collective, and ranks that disagree on a knob pair rows
that do not belong together. So each rank's statement travels, as one number, in the gather that plans the layer,
and every rank raises the same refusal.

Shape suffixes: N tokens, E experts, H hidden width, I intermediate width, G = 2I.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from zlib import crc32

import torch
from torch import Tensor

from operators.dispatch_launch import DispatchLaunch
from operators.errors import RuleError
from operators.kernels.swiglu import Gate
from operators.ranks import Ranks
from operators.routing import Routing

if TYPE_CHECKING:
    from operators.expert_mlp import ExpertWeights

_RULES = (
    (
        "hidden is [tokens, hidden] with the routing's token count",
        "Flatten batch and sequence, and pass the routing of these tokens.",
    ),
    ("scores are [tokens, experts]", "Pass the full router scores, not only the chosen ones."),
    (
        "gate_up is [experts/ranks, 2·intermediate, hidden], down is [experts/ranks, hidden, intermediate]",
        "Pass this rank's experts only, out x in.",
    ),
    (
        "biases are [experts/ranks, 2·intermediate] and [experts/ranks, hidden]",
        "Pass the biases of this rank's experts, or None.",
    ),
    ("hidden and expert weights have one dtype", "Cast the layer input to the weights' dtype."),
    (
        "float64 router scores go with a float64 layer; routes are weighted and summed in float32 else",
        "Pass the scores in float32 or in the layer's dtype.",
    ),
)
_AGREED = (
    "dispatch launch knobs",
    "hidden and intermediate width, dtype, biases and gate",
    "which gradients are wanted",
)
# One positive int64 a rank: the number of the broken rule, then a hash of each thing to agree on.
_PROBLEM_BITS, _HASH_BITS = 3, 20
_HASHES = (1 << _HASH_BITS) - 1


@dataclass(frozen=True, slots=True)
class Statement:
    """One rank's call: what is wrong with it, and what must be the same everywhere."""

    problem: int = 0
    """1 + the number of the broken rule, 0 for none."""
    value: object = None
    layer: str = ""
    gradients: str = ""

    def packed(self, launch: DispatchLaunch) -> int:
        """The statement as a number; a hash is never 0, which stands for nothing said."""
        number = 0
        for text in (self.gradients, self.layer, repr(launch.agreed)):
            said = crc32(text.encode()) % _HASHES + 1 if text else 0
            number = number << _HASH_BITS | said
        return number << _PROBLEM_BITS | self.problem


NOTHING_SAID = Statement()


def state(
    hidden_NH: Tensor,
    scores_NE: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    *,
    ranks: Ranks,
    gate: Gate,
) -> Statement:
    """This rank's statement about a call of :func:`operators.pipelined_llep.pipelined_llep`."""
    problem, value = _first_problem(hidden_NH, scores_NE, routing, weights, ranks)
    if problem:
        return Statement(problem, value)
    wanted = [w is not None and w.requires_grad for w in weights]
    runs_backward = torch.is_grad_enabled() and (
        any(wanted) or hidden_NH.requires_grad or scores_NE.requires_grad
    )
    return Statement(
        layer=repr(
            (
                hidden_NH.shape[1],
                weights.gate_up_EGH.shape[1],
                hidden_NH.dtype,
                [w is None for w in weights],
                gate,
            )
        ),
        gradients=repr(wanted) if runs_backward else "none",
    )


def refuse(statement: Statement, rank: int = 0) -> None:
    """Raise what is wrong with this rank's call, if anything is."""
    if statement.problem:
        _raise(statement.problem, rank, statement.value)


def compare(packed: Sequence[int], mine: Statement, rank: int) -> None:
    """Raise, on every rank alike, what is wrong with any rank's call or differs between them.

    Args:
        packed: every rank's :meth:`Statement.packed`; 0 from one that said nothing (loopback peers).
    """
    refuse(mine, rank)
    for other, number in enumerate(packed):
        problem = number & (1 << _PROBLEM_BITS) - 1
        if problem:
            _raise(problem, other, None)
    for place, name in enumerate(_AGREED):
        shift = _PROBLEM_BITS + place * _HASH_BITS
        hashes = [number >> shift & _HASHES for number in packed]
        groups = [[r for r, h in enumerate(hashes) if h == one] for one in dict.fromkeys(hashes) if one]
        if len(groups) > 1:
            raise RuleError(
                rule=f"all ranks of the expert group agree on: {name}",
                value=f"ranks {groups[0]} say one thing, ranks {groups[1]} another",
                remedy="Call the layer alike on every rank, also on one without tokens.",
            )


def agree_on_sizes(header_3: Tensor, experts: int, max_chunks: int) -> None:
    """Refuse, on every rank, counts of different sizes, which no gather can carry.

    Args:
        header_3: ``[any, code, -code]`` reduced by its largest over the group, code from :func:`size_code`. On a GPU
            the refusal is a device-side assertion: nothing here waits for the device.
    """
    if header_3.device.type != "cpu":
        torch._assert_async(
            header_3[1] == -header_3[2],
            "ranks of an expert group must agree on the number of experts and on max_chunks",
        )
        return
    _, most, least = header_3.tolist()
    if most != -least:
        raise RuleError(
            rule="all ranks of the expert group agree on: the number of experts and max_chunks",
            value=f"experts={experts}, max_chunks={max_chunks} here; others differ",
            remedy="Build the layer alike on every rank, also on one without tokens.",
        )


def size_code(experts: int, max_chunks: int) -> int:
    """One number for both."""
    return experts << 32 | max_chunks


def _first_problem(
    hidden_NH: Tensor, scores_NE: Tensor, routing: Routing, weights: ExpertWeights, ranks: Ranks
) -> tuple[int, object]:
    """1 + number of the first broken rule, and the value that broke it."""
    if hidden_NH.dim() != 2 or hidden_NH.shape[0] != routing.tokens:
        return 1, (tuple(hidden_NH.shape), routing.tokens)
    if tuple(scores_NE.shape) != (routing.tokens, routing.experts):
        return 2, tuple(scores_NE.shape)
    up, down = tuple(weights.gate_up_EGH.shape), tuple(weights.down_EHI.shape)
    hidden, local = hidden_NH.shape[1], routing.experts // ranks.size
    if len(up) != 3 or up[::2] != (local, hidden) or up[1] % 2 or down != (local, hidden, up[1] // 2):
        return 3, (up, down)
    shapes = ((local, up[1]), (local, hidden))
    for bias, shape in zip(weights[2:], shapes, strict=True):
        if bias is not None and tuple(bias.shape) != shape:
            return 4, tuple(bias.shape)
    dtypes = (hidden_NH.dtype, *(w.dtype for w in weights if w is not None))
    if len(set(dtypes)) > 1:
        return 5, dtypes
    if scores_NE.dtype == torch.float64 and hidden_NH.dtype != torch.float64:
        return 6, (scores_NE.dtype, hidden_NH.dtype)
    return 0, None


def _raise(problem: int, rank: int, value: object) -> None:
    rule, remedy = _RULES[problem - 1]
    raise RuleError(rule=rule, value=f"rank {rank}'s inputs" if value is None else value, remedy=remedy)
