"""What is to be trained per step: how long the context is and how many tokens one update sees."""

from __future__ import annotations

from dataclasses import dataclass

from cost_model.errors import RuleError

MAX_TOKENS = 2**40
"""Of a context or a batch: beyond it a number is a slip of the finger."""
MAX_IMBALANCE = 1e6
_MOST = {
    "context_tokens": MAX_TOKENS,
    "global_batch_tokens": MAX_TOKENS,
    "migrated_experts": 100_000,
    "activation_bytes": 8,
}


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
        for name, most in _MOST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value > most:
                raise RuleError(
                    rule=f"{name} must be a whole number of at most {most}",
                    value=value,
                    remedy="Correct the value.",
                )
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
        if self.migrated_experts < 0:
            raise RuleError(
                rule="migrated_experts counts guests, so it is at least 0",
                value=self.migrated_experts,
                remedy="Use 0 for a router that needs none.",
            )
        if not 1 <= self.imbalance <= MAX_IMBALANCE:  # a NaN is refused too
            raise RuleError(
                rule=f"imbalance is largest over mean load, so it is from 1 to {MAX_IMBALANCE:g}",
                value=self.imbalance,
                remedy="Use 1.0 for a perfectly balanced router.",
            )
        if self.activation_bytes not in (2, 4, 8):
            raise RuleError(
                rule="activation_bytes must be 2, 4 or 8",
                value=self.activation_bytes,
                remedy="Use 2 for bf16.",
            )

    def check_model(self, experts: int) -> None:
        """Refuse a workload that a model of ``experts`` routed experts cannot have.

        Raises:
            RuleError: more guests on a rank than there are experts.
        """
        if self.migrated_experts > experts:
            raise RuleError(
                rule=f"a rank holds at most the model's {experts} experts as guests (migrated_experts)",
                value=self.migrated_experts,
                remedy="Use the largest number that a routing trace showed, or 0.",
            )
