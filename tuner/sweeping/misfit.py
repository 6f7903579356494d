"""Whether a sweep's target can be had from an executor at all, as far as one sees without trying."""

from __future__ import annotations

from cost_model.errors import RuleError
from tuner.executors.base import Executor, GangTask, NoSite
from tuner.sweeping.sweep_spec import Target


def misfit(executor: Executor, target: Target) -> RuleError | None:
    """Why gangs of this target cannot run here: room, device, nodes or hardware; None when they can."""
    rule = f"a sweep's target must fit the machine that runs it ({target.device})"
    value = f"{target.ranks} ranks on {target.nodes} node{'s' if target.nodes > 1 else ''}"
    task = GangTask(
        "", {}, ranks=target.ranks, device=target.device, nodes=target.nodes, hardware_id=target.hardware_id
    )
    if (refusal := executor.refusal(task)) is not None:
        return RuleError(
            rule=rule,
            value=value,
            remedy=f"Here it does not: {refusal}. Correct the target, or leave it to workers that have the room.",
        )
    if target.hardware_id is None:
        return None
    try:
        here = executor.site(target.device, target.nodes, target.hardware_id).hardware_id
    except NoSite as nowhere:
        return RuleError(rule=rule, value=value, remedy=f"Here it does not: {nowhere}")
    if here == target.hardware_id:
        return None
    return RuleError(
        rule="a sweep bound to one kind of hardware runs only there",
        value=target.hardware_id,
        remedy=f"Here is {here}: leave it to workers there, or correct target.hardware_id.",
    )
