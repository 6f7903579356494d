"""LaunchConfig: the knobs a training job is started with, under the names the exported file uses."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

DispatchSchedule = Literal["serial", "prefetch", "overlap"]
RingMode = Literal["activations", "weights", "auto", "gather"]
OptimizerEngine = Literal["device", "stream", "host", "split"]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Degrees D, E_p, P and the knobs of the four operators (theory section 1)."""

    sequence_degree: int
    expert_degree: int
    vocab_degree: int
    max_tokens_per_rank: int
    accumulation_steps: int
    chunk_tokens: int
    max_chunks: int
    dispatch_schedule: DispatchSchedule
    strip_rows: int
    """Rows of one tile of a logits strip (n_t)."""
    ring_mode: RingMode
    host_budget_bytes: int
    """Locked host bytes a rank may use for checkpoint boundaries."""
    optimizer_engine: OptimizerEngine
    """``device`` keeps the optimizer state on the card (16 bytes a parameter); the others keep it on the host."""
    bucket_params: int
    staging_slots: int
    host_share: float = 0.0
    alpha: float = 1.0
    min_rows: int = 1024
    lambda_: float = 1.3
    placement: Literal["contiguous"] = "contiguous"

    @property
    def chunks(self) -> int:
        """K by Eq. 1 at N = N_max."""
        return min(-(-self.max_tokens_per_rank // self.chunk_tokens), self.max_chunks)

    def to_json(self) -> dict[str, Any]:
        """The keys of ``launch.json`` (``lambda_`` becomes ``lambda``)."""
        body = asdict(self)
        body["lambda"] = body.pop("lambda_")
        return {"schema_version": SCHEMA_VERSION, **body}
