"""What is to be trained per step: how long the context is and how many tokens one update sees."""

from __future__ import annotations

from dataclasses import dataclass

from cost_model.errors import RuleError


@dataclass(frozen=True, slots=True)
class Workload:
    """``global_batch_tokens`` is the whole update; accumulation follows from it, the context and W."""

    context_tokens: int
    global_batch_tokens: int
    imbalance: float = 1.3
    """Largest over mean load of a rank that the router is expected to show (expected mode; theory: lambda)."""
    migrated_experts: int = 0
    """Experts a rank is expected to hold as guests in one layer."""
    activation_bytes: int = 2
    """b: bytes per activation scalar."""

    def __post_init__(self) -> None:
        if self.context_tokens < 1:
            raise RuleError(
                rule="context_tokens must be at least 1",
                value=self.context_tokens,
                remedy="Give the sequence length in tokens, for example 131072.",
            )
        if self.global_batch_tokens < self.context_tokens or self.global_batch_tokens % self.context_tokens:
            raise RuleError(
                rule="global_batch_tokens must be a positive multiple of context_tokens",
                value=self.global_batch_tokens,
                remedy=f"Use {max(1, round(self.global_batch_tokens / self.context_tokens)) * self.context_tokens}.",
            )
        if self.imbalance < 1:
            raise RuleError(
                rule="imbalance is largest over mean load, so it is at least 1",
                value=self.imbalance,
                remedy="Use 1.0 for a perfectly balanced router.",
            )
        if self.activation_bytes not in (2, 4, 8):
            raise RuleError(
                rule="activation_bytes must be 2, 4 or 8",
                value=self.activation_bytes,
                remedy="Use 2 for bf16.",
            )
