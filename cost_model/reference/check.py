"""How far Eq. 6's terms are from what public reports and the paper measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cost_model.bounds.checkpoint_offload import boundary_bytes, checkpoint_offload_terms
from cost_model.bounds.ring_dtp import materialised_head_bytes
from cost_model.bounds.stream_adamw import staging_bytes
from cost_model.presets import preset
from cost_model.reference.load import load_public_cases

GIB = 2**30
GPT_OSS_20B = {"hidden": 2880, "boundaries": 47}


@dataclass(frozen=True, slots=True)
class CaseError:
    """One public figure against the formula for it; GiB, or tokens for ``chunk_limit``."""

    id: str
    kind: str
    source: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return (self.predicted - self.measured) / self.measured


def public_case_errors() -> list[CaseError]:
    """Every shipped case with its prediction."""
    cases = load_public_cases()
    constants = _series_constants(cases)
    errors = []
    for case in cases:
        kind = case["kind"]
        if kind in constants:
            predicted = constants[kind] + _VARIABLE[kind](case)
            measured = case["measured_gib"]
        else:
            predicted, measured = _ABSOLUTE[kind](case)
        errors.append(CaseError(case["id"], kind, case["source"], predicted, measured))
    return errors


def _residency(case: dict[str, Any]) -> float:
    # The optimizer lives on the device: 4 bytes of weights and gradients, 12 of state.
    return float(16 * case["params"] / case["gpus"] / GIB)


def _boundary_series(case: dict[str, Any]) -> float:
    terms = checkpoint_offload_terms(
        tokens=case["tokens"],
        hidden=GPT_OSS_20B["hidden"],
        boundaries=GPT_OSS_20B["boundaries"],
        offloaded=min(case["offloaded"], GPT_OSS_20B["boundaries"] - 1),
    )
    return sum(terms.values()) / GIB


_VARIABLE: dict[str, Callable[[dict[str, Any]], float]] = {
    "residency_16": _residency,
    "boundary_series": _boundary_series,
}
"""Series of one setup: the formula gives what changes, all else is one constant per series."""


def _series_constants(cases: list[dict[str, Any]]) -> dict[str, float]:
    constants = {}
    for kind, variable in _VARIABLE.items():
        rest = [case["measured_gib"] - variable(case) for case in cases if case["kind"] == kind]
        constants[kind] = sum(rest) / len(rest)
    return constants


def _offload_difference(case: dict[str, Any]) -> tuple[float, float]:
    return 12 * case["params"] / case["gpus"] / GIB, case["kept_gib"] - case["offloaded_gib"]


def _logits(case: dict[str, Any]) -> tuple[float, float]:
    nbytes = case["tokens"] * case["vocab_per_rank"] * case["scalar_bytes"]
    return nbytes / GIB, case["measured_gib"]


def _head(case: dict[str, Any]) -> tuple[float, float]:
    nbytes = materialised_head_bytes(
        tokens=case["tokens"], hidden=case["hidden"], vocab=case["vocab"], scalar_bytes=case["scalar_bytes"]
    )
    return nbytes / GIB, case["measured_gib"]


def _boundaries(case: dict[str, Any]) -> tuple[float, float]:
    one = boundary_bytes(tokens=case["tokens"], hidden=case["hidden"], scalar_bytes=case["scalar_bytes"])
    return case["boundaries"] * one / GIB, case["measured_gib"]


def _staging(case: dict[str, Any]) -> tuple[float, float]:
    return staging_bytes(case["bucket_params"], case["staging_slots"]) / GIB, case["measured_gib"]


def _outside(case: dict[str, Any]) -> tuple[float, float]:
    return preset("hgx-h100").outside_allocator_bytes.value / GIB, case["after_gb"] * 1e9 / GIB


def _slack(case: dict[str, Any]) -> tuple[float, float]:
    share = preset("hgx-h100").allocator_slack_fraction.value
    return share * case["allocated_gib"], case["reserved_gib"] - case["allocated_gib"]


def _chunk_limit(case: dict[str, Any]) -> tuple[float, float]:
    return (case["rows_limit"] - case["extra_rows"]) // case["rows_per_token"], case["max_tokens"]


_ABSOLUTE: dict[str, Callable[[dict[str, Any]], tuple[float, float]]] = {
    "offload_difference": _offload_difference,
    "logits": _logits,
    "materialised_head": _head,
    "boundaries": _boundaries,
    "staging": _staging,
    "outside_allocator": _outside,
    "allocator_slack": _slack,
    "chunk_limit": _chunk_limit,
}
