"""The launch knobs of dispatch, and Eq. 1."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from operators.errors import RuleError

DispatchSchedule = Literal["serial", "prefetch", "overlap"]
BackwardForm = Literal["chunked", "nested"]


@dataclass(frozen=True, slots=True)
class DispatchLaunch:
    """How PipelinedLLEP runs a layer. Equal on all ranks of the expert group.

    Attributes:
        chunk_tokens: c, token budget of one source rank per chunk.
        max_chunks: K_max.
        dispatch_schedule: ``serial`` moves and computes in turn; ``prefetch`` has the next chunk's rows on the
            way while one chunk computes; ``overlap`` lets the previous chunk's rows return meanwhile, too.
        alpha: LLEP capacity factor.
        min_rows: m, the fewest rows worth a matmul on a guest rank.
        lambda_: λ, imbalance below which plain expert parallelism runs.
        migrate: False keeps every row on its native rank (standard expert parallelism).
        backward: ``chunked`` recomputes and differentiates one chunk at a time; ``nested`` is the paper's
            checkpoint per chunk, kept to compare against.
    """

    chunk_tokens: int
    max_chunks: int = 64
    dispatch_schedule: DispatchSchedule = "serial"
    alpha: float = 1.0
    min_rows: int = 1024
    lambda_: float = 1.3
    migrate: bool = True
    backward: BackwardForm = "chunked"

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1 or self.max_chunks < 1:
            raise RuleError(
                rule="chunk_tokens >= 1 and max_chunks >= 1",
                value=(self.chunk_tokens, self.max_chunks),
                remedy="chunk_tokens = N_max gives one chunk; max_chunks caps K.",
            )
        if not (1.0 <= self.alpha < math.inf) or self.min_rows < 1 or math.isnan(self.lambda_):
            raise RuleError(
                rule="alpha is a finite number >= 1, min_rows >= 1, lambda is a number",
                value=(self.alpha, self.min_rows, self.lambda_),
                remedy="alpha = 1 is the tightest capacity that can hold all rows; min_rows counts rows.",
            )
        if self.dispatch_schedule not in get_args(DispatchSchedule):
            raise RuleError(
                rule="dispatch_schedule is serial, prefetch or overlap",
                value=self.dispatch_schedule,
                remedy="serial needs the least memory.",
            )
        if self.backward not in get_args(BackwardForm):
            raise RuleError(
                rule="backward is chunked or nested", value=self.backward, remedy="Use chunked for training."
            )

    @classmethod
    def for_chunks(
        cls,
        chunks: int,
        tokens_max: int,
        *,
        dispatch_schedule: DispatchSchedule = "serial",
        alpha: float = 1.0,
        min_rows: int = 1024,
        lambda_: float = 1.3,
        migrate: bool = True,
        backward: BackwardForm = "chunked",
    ) -> DispatchLaunch:
        """The canonical knobs of K chunks: c = ⌈N_max/K⌉, K_max = K."""
        return cls(
            chunk_tokens=max(1, -(-tokens_max // max(chunks, 1))),
            max_chunks=chunks,
            dispatch_schedule=dispatch_schedule,
            alpha=alpha,
            min_rows=min_rows,
            lambda_=lambda_,
            migrate=migrate,
            backward=backward,
        )

    @property
    def agreed(self) -> tuple[object, ...]:
        """What has to be equal on all ranks: with one chunk its token budget says nothing."""
        balance = (self.alpha, self.min_rows, self.lambda_) if self.migrate else ()
        budget = self.chunk_tokens if self.max_chunks > 1 else 0
        return budget, self.max_chunks, self.dispatch_schedule, self.backward, balance

    def chunks(self, tokens_max: int) -> int:
        """K of Eq. 1 for the largest token count of the group (1 when nobody has a token)."""
        return max(1, min(-(-tokens_max // self.chunk_tokens), self.max_chunks))
