"""``launch.json``: the form of a plan that ``operators.launch`` reads, for the knobs no framework has."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from cost_model.errors import RuleError
from cost_model.launch import SCHEMA_VERSION
from operators.errors import RuleError as OperatorRuleError
from operators.launch import parse_launch

_MODEL_KEYS = ("name", "hidden", "layers", "vocab", "experts", "top_k", "expert_intermediate")


def export_launch(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The content of ``launch.json`` for a plan (the object ``flatpeak plan --json`` prints).

    Raises:
        RuleError: the object is no plan, or its verdict says that the launch does not fit: such a file would
            only move the out-of-memory error from here to the cluster.
    """
    for key, needed in (("launch", ()), ("model", _MODEL_KEYS), ("cluster", ("hardware_id",))):
        part = plan.get(key)
        missing = [name for name in needed if not isinstance(part, Mapping) or name not in part]
        if not isinstance(part, Mapping) or missing:
            raise RuleError(
                rule=f"an export needs a plan with {key!r}" + (f".{missing[0]}" if missing else ""),
                value=sorted(plan),
                remedy="Give the object that `flatpeak plan --json` prints or /v1/plans returns.",
            )
    if plan.get("verdict") == "does_not_fit":
        raise RuleError(
            rule="only a plan that fits or is at risk is exported",
            value=plan["verdict"],
            remedy="Follow the plan's what_would_fit: a shorter context or more GPUs, then plan again.",
        )
    content = {
        "schema_version": SCHEMA_VERSION,
        "flatpeak_version": version("flatpeak"),
        "plan_id": plan.get("id"),
        "hardware_id": plan["cluster"]["hardware_id"],
        "model": {key: plan["model"][key] for key in _MODEL_KEYS},
        "launch": dict(plan["launch"]),
    }
    try:
        parse_launch(content)  # what the job would refuse is refused here
    except OperatorRuleError as error:
        raise RuleError(
            rule=error.rule, value=error.value, remedy="Plan again and export that plan."
        ) from None
    return content
