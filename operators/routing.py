"""The routing record of a layer, and the routers that tests and measurements use.

Shape suffixes: N tokens of this rank, E experts, K experts a token picks (top-k).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from operators.errors import RuleError

_WHOLE = re.compile(r"[0-9]{1,9}", re.ASCII)


@dataclass(frozen=True, eq=False)
class Routing:
    """Which experts each token picked: the saved record that backward and recompute replay.

    A router run a second time may break ties the other way; then rows, splits and peers would no longer
    match. So the choice is taken once, and whatever runs again gathers its scores at these ids.

    Attributes:
        ids_NK: int64, experts in ``[0, experts)``. An expert may repeat within a token.
        experts: E, over the whole expert group.
    """

    ids_NK: Tensor  # noqa: N815 - shape suffix
    experts: int

    def __post_init__(self) -> None:
        if self.ids_NK.dim() != 2 or self.ids_NK.dtype != torch.int64:
            raise RuleError(
                rule="expert ids are an int64 matrix [tokens, top_k]",
                value=(tuple(self.ids_NK.shape), self.ids_NK.dtype),
                remedy="Pass torch.topk(...).indices, or ids.long().",
            )
        if self.ids_NK.shape[1] < 1 or self.experts < 1:
            raise RuleError(
                rule="a token picks at least one expert, of at least one",
                value=(self.ids_NK.shape[1], self.experts),
                remedy="Pass top_k >= 1 columns of ids.",
            )

    @property
    def tokens(self) -> int:
        return self.ids_NK.shape[0]

    @property
    def top_k(self) -> int:
        return self.ids_NK.shape[1]

    def weights(self, scores_NE: Tensor, *, normalize: bool = False) -> Tensor:
        """Scores at the saved ids, ``[N, K]``, differentiable with respect to ``scores_NE``.

        Args:
            scores_NE: Full router scores, any float dtype.
            normalize: Divide by the sum over the picked experts (Qwen and DeepSeek do).
        """
        weights_NK: Tensor = _GatherScores.apply(scores_NE, self.ids_NK)  # type: ignore[no-untyped-call]
        return weights_NK / weights_NK.sum(dim=1, keepdim=True) if normalize else weights_NK


class _GatherScores(torch.autograd.Function):
    """``gather`` whose gradient has no atomics, so two runs agree bit for bit.

    Routes of a token that name one expert all write the sum over them, so whichever comes last is right.
    """

    @staticmethod
    def forward(ctx: Any, scores_NE: Tensor, ids_NK: Tensor) -> Tensor:
        ctx.save_for_backward(ids_NK)
        ctx.experts = scores_NE.shape[1]
        return scores_NE.gather(1, ids_NK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (ids_NK,) = ctx.saved_tensors
        (grad_NK,) = grads
        same_NKK = ids_NK.unsqueeze(2) == ids_NK.unsqueeze(1)
        total_NK = torch.where(same_NKK, grad_NK.unsqueeze(1), 0).sum(2)
        return grad_NK.new_zeros(ids_NK.shape[0], ctx.experts).scatter_(1, ids_NK, total_NK), None


class _Replay:
    """Routings of one checkpointed region, in call order."""

    def __init__(self) -> None:
        self.records: list[Routing] = []
        self.next: int | None = None  # None while recording


_replay: ContextVar[_Replay | None] = ContextVar("flatpeak_routing_replay", default=None)


class _Active:
    """Makes a replay current, for recording or from its first record; may be entered again."""

    def __init__(self, replay: _Replay, *, recording: bool) -> None:
        self._replay, self._recording = replay, recording

    def __enter__(self) -> None:
        self._replay.next = None if self._recording else 0
        if self._recording:
            self._replay.records.clear()
        self._token = _replay.set(self._replay)

    def __exit__(self, *_: object) -> None:
        _replay.reset(self._token)


def replay_routing() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """A ``context_fn`` for ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``.

    Every :func:`route` inside the checkpointed region is recorded in the first forward and returned
    unchanged in the recompute, whatever the router would say then.
    """
    replay = _Replay()
    return _Active(replay, recording=True), _Active(replay, recording=False)


def route(scores_NE: Tensor, top_k: int, choose: Callable[[Tensor, int], Tensor] | None = None) -> Routing:
    """Pick experts for every token, once.

    Args:
        scores_NE: Router scores.
        top_k: Experts a token picks.
        choose: ``(scores, top_k) -> ids [N, K]``; by default the largest scores, equal ones by lowest id.

    Raises:
        RuleError: top_k outside ``[1, experts]``.
    """
    replay = _replay.get()
    if replay is not None and replay.next is not None:
        record = replay.records[replay.next]
        replay.next += 1
        return record
    if not 1 <= top_k <= scores_NE.shape[1]:
        raise RuleError(
            rule="1 <= top_k <= experts",
            value=(top_k, scores_NE.shape[1]),
            remedy="Pick fewer experts a token.",
        )
    with torch.no_grad():
        ids_NK = (choose or _largest)(scores_NE.detach(), top_k)
    record = Routing(ids_NK.long(), scores_NE.shape[1])
    if replay is not None:
        replay.records.append(record)
    return record


def _largest(scores_NE: Tensor, top_k: int) -> Tensor:
    return torch.sort(scores_NE, dim=1, descending=True, stable=True).indices[:, :top_k].contiguous()


def profile(
    name: str,
    tokens: int,
    experts: int,
    top_k: int,
    rank: int = 0,
    *,
    ranks: int = 1,
    step: int = 0,
    device: torch.device | str = "cpu",
) -> Routing:
    """A router of a known shape.

    Names: ``balanced``; ``skew:R/h`` (R percent of the tokens take the first h experts, theory's r/h);
    ``random``; ``one_hot`` (every token takes experts 0 … k−1: the worst case); ``rank_dependent`` (each rank
    prefers experts of its own); ``drifting`` (the favourite experts move with ``step`` and along the
    sequence); ``ties`` (every score equal, the tie broken otherwise at every ``step``).
    ``balanced``, ``skew``, ``one_hot`` and ``drifting`` depend on positions only and are equal on all ranks.

    Raises:
        RuleError: unknown name, or top_k outside ``[1, experts]``.
    """
    if not 1 <= top_k <= experts:
        raise RuleError(
            rule="1 <= top_k <= experts", value=(top_k, experts), remedy="Pick fewer experts a token."
        )
    i = torch.arange(tokens, device=device).unsqueeze(1)
    j = torch.arange(top_k, device=device).unsqueeze(0)
    kind, mark, detail = name.partition(":")
    if mark and kind != "skew":
        kind = name  # no other profile has details: this is none that is known
    if kind == "balanced":
        ids = (i + j) % experts
    elif kind == "skew":
        ids = _skew(detail, i, j, tokens, experts)
    elif kind == "one_hot":
        ids = j.expand(tokens, top_k)
    elif kind == "random":
        ids = _distinct(torch.rand(tokens, experts, generator=_seeded(rank, step)), top_k).to(device)
    elif kind == "rank_dependent":
        scores = torch.rand(tokens, experts, generator=_seeded(rank, step))
        favourite = (torch.arange(experts) * 7 + rank * 3) % max(ranks, 2) == 0
        ids = _distinct(scores + favourite * (0.4 + 0.2 * (rank % 3)), top_k).to(device)
    elif kind == "drifting":
        shift = step * max(1, experts // 4) + (i * 4 // max(tokens, 1)) * max(1, experts // 8)
        hot = (i % 4) != 0
        ids = torch.where(hot, (j + shift) % experts, (i + j) % experts)
    elif kind == "ties":
        ids = (
            (j * 2 + (step + rank) % 2 + (i // 3)) % experts if 2 * top_k <= experts else (j + step) % experts
        )
        ids = ids.expand(tokens, top_k)
    else:
        raise RuleError(
            rule="a routing profile has a known name",
            value=name,
            remedy="Use balanced, skew:R/h, random, one_hot, rank_dependent, drifting or ties.",
        )
    return Routing(ids.long().contiguous(), experts)


def _skew(detail: str, i: Tensor, j: Tensor, tokens: int, experts: int) -> Tensor:
    percent, _, count = detail.partition("/")
    written = _WHOLE.fullmatch(percent) and _WHOLE.fullmatch(count)
    if not (written and int(percent) <= 100 and 0 < int(count) < experts):
        raise RuleError(
            rule="a skew profile is skew:R/h with R in [0, 100] and 0 < h < experts",
            value=detail,
            remedy="For example skew:80/16.",
        )
    hot, first = int(percent) * tokens // 100, int(count)
    rest = first + (i + j) % (experts - first)
    return torch.where(i < hot, j % first, rest)


def _seeded(rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * step + rank)


def _distinct(scores: Tensor, top_k: int) -> Tensor:
    return _largest(scores, top_k)
