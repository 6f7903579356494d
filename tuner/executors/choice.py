"""An executor by its name, as the command line gives it."""

from __future__ import annotations

from cost_model.errors import RuleError
from tuner.executors.base import Executor

EXECUTORS = ("local", "ray")


def make_executor(name: str, ray_address: str | None = None) -> Executor:
    """The executor of this machine, or one on a Ray cluster.

    Args:
        ray_address: see :class:`tuner.executors.ray.RayExecutor`; a cluster of this machine alone without it.

    Raises:
        RuleError: no such executor; an address without Ray; no Ray, no token or no cluster at the address.
    """
    if name not in EXECUTORS:
        raise RuleError(
            rule="an executor is one of those there are",
            value=name,
            remedy=f"Choose among {list(EXECUTORS)}.",
        )
    if name == "ray":
        from tuner.executors.ray import RayExecutor

        return RayExecutor(ray_address)
    if ray_address is not None:
        raise RuleError(
            rule="an address of a Ray cluster goes with the executor ray",
            value=ray_address,
            remedy="Add --executor ray, or leave the address out.",
        )
    from tuner.executors.local import LocalExecutor

    return LocalExecutor()
