"""The operators as the tuner sees them: one interface, found by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from cost_model.errors import RuleError
from tuner.space import Config, Space

if TYPE_CHECKING:
    from torch import Tensor

    from operators.ranks import Ranks

Shape = dict[str, Any]


@dataclass(frozen=True)
class Runnable:
    """One configuration, built on one rank and ready to be timed.

    Attributes:
        passes: what is timed, by name, in order; together they are one repetition.
        held: tensors that live all the time (inputs, weights): counted in every peak.
        held_bytes: device memory that the operator holds beside ``held``, in tensors of its own.
        reset: untimed, before each repetition: drops gradients and results of the last one.
        host_locked_bytes: host memory that stays locked.
    """

    passes: Mapping[str, Callable[[], None]]
    held: tuple[Tensor, ...] = ()
    reset: Callable[[], None] = lambda: None
    held_bytes: int = 0
    host_locked_bytes: int = 0

    def forward_backward(self) -> None:
        """One repetition."""
        self.reset()
        for run in self.passes.values():
            run()


class OperatorAdapter(Protocol):
    """What a sweep needs to know of an operator. Nothing here imports torch before ``build``.

    ``version`` is raised by hand when a schedule or kernel changes: older measurements then no longer count.
    ``providers`` names the operator (``flatpeak``) and the baselines it is compared with.
    """

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def providers(self) -> tuple[str, ...]: ...
    @property
    def has_peers(self) -> bool:
        """Ranks exchange tensors: one of them can play its part of a group in loopback."""

    @property
    def multiplies(self) -> bool:
        """It multiplies matrices: on CUDA their library keeps a workspace in the allocator."""

    def shape(self, given: Mapping[str, Any], ranks: int) -> Shape:
        """The complete, legal shape; raises RuleError."""

    def space(self, shape: Shape, ranks: int, provider: str) -> Space:
        """Knobs and their default values."""

    def canonical(self, shape: Shape, config: Config, ranks: int) -> Config:
        """The same point in its one spelling (one chunk has no schedule, a strip is no longer than N)."""

    def bound_bytes(self, shape: Shape, config: Config, ranks: int, provider: str) -> dict[str, int]:
        """Eq. 6 terms of one rank, in bytes; their sum bounds the peak."""

    def build(self, shape: Shape, config: Config, ranks: Ranks, device: str, provider: str) -> Runnable: ...

    def reference_check(
        self, shape: Shape, config: Config, ranks: Ranks, device: str, provider: str
    ) -> tuple[float, float]:
        """Largest relative error against a dense reference on a small problem, and what is allowed.

        A collective: every rank calls it.
        """


# Adapters are named, not imported: a rank loads only the one it runs, and a page that lists sweeps none.
_ADAPTERS = {
    "pipelined_llep": "tuner.operators.pipelined_llep:ADAPTER",
    "ring_dtp": "tuner.operators.ring_dtp:ADAPTER",
    "checkpoint_offload": "tuner.operators.checkpoint_offload:ADAPTER",
    "stream_adamw": "tuner.operators.stream_adamw:ADAPTER",
}


def operator_names() -> tuple[str, ...]:
    """Names that a sweep may give."""
    return tuple(_ADAPTERS)


def reference(name: str) -> str:
    """``module:name`` of an operator's adapter, which ranks load. An own operator is given in this form.

    Raises:
        RuleError: unknown operator.
    """
    if name in _ADAPTERS:
        return _ADAPTERS[name]
    if ":" in name:
        return name
    raise RuleError(
        rule="a sweep names an operator of the registry",
        value=name,
        remedy=f"Choose one of {list(_ADAPTERS)}, or give an adapter of your own as module:name.",
    )


def load_adapter(name: str) -> OperatorAdapter:
    """The adapter of an operator.

    Raises:
        RuleError: unknown operator, or an adapter of one's own that cannot be imported or lacks something.
    """
    module, _, attribute = reference(name).partition(":")
    if name in _ADAPTERS:
        adapter: OperatorAdapter = getattr(importlib.import_module(module), attribute)
        return adapter
    try:
        own: Any = getattr(importlib.import_module(module), attribute)
        missing = _missing(own)
    except Exception as error:  # a module of one's own may raise anything
        said = " ".join(str(error).split()) or type(error).__name__
        raise RuleError(
            rule="an operator's adapter must be importable",
            value=name,
            remedy=f"Check module and name, and that PYTHONPATH names the module's folder: {said}.",
        ) from error
    if missing:
        raise RuleError(
            rule=f"an operator's adapter is an instance with {', '.join(_MEMBERS)}",
            value=f"{name} without {', '.join(missing)}",
            remedy="Add what is missing: docs/sweeps.md, An operator of one's own, has a whole adapter.",
        )
    checked: OperatorAdapter = own
    return checked


@contextmanager
def answers(name: str) -> Iterator[None]:
    """What an adapter of one's own raises while it is asked becomes an error of rule, value and remedy.

    Raises:
        RuleError: it raised.
    """
    try:
        yield
    except Exception as error:
        if name in _ADAPTERS or hasattr(error, "remedy"):
            raise
        said = " ".join(str(error).split())
        raise RuleError(
            rule="an operator's adapter must answer for every shape and point",
            value=name,
            remedy=f"Correct it where it raised {type(error).__name__}: {said}.",
        ) from error


_MEMBERS = tuple(member for member in vars(OperatorAdapter) if not member.startswith("_"))


def _missing(adapter: Any) -> list[str]:
    """Members that an adapter lacks, or has from the protocol alone."""
    if isinstance(adapter, type):
        return list(_MEMBERS)
    kind = type(adapter)
    return [
        member
        for member in _MEMBERS
        if getattr(kind, member, None) is getattr(OperatorAdapter, member)
        or getattr(adapter, member, None) is None
    ]


def check_provider(adapter: OperatorAdapter, provider: str) -> str:
    """``provider`` when the operator has it.

    Raises:
        RuleError: it has not.
    """
    if provider not in adapter.providers:
        raise RuleError(
            rule=f"{adapter.name} is measured with one of its providers",
            value=provider,
            remedy=f"Choose one of {list(adapter.providers)}.",
        )
    return provider


MOST = 2**40
"""No size of a shape is larger: what follows from several of them is still a number that databases hold."""


def check_keys(
    operator: str,
    given: Mapping[str, Any],
    required: Mapping[str, type],
    optional: Mapping[str, Any],
    most: Mapping[str, int] | None = None,
) -> Shape:
    """A shape from what a user wrote: known keys only, whole positive numbers, defaults filled in.

    Args:
        required: key to type; numbers must be positive.
        optional: key to default value, whose type the given value must have.
        most: key to its largest value, where that is less than ``MOST``.

    Raises:
        RuleError: a key is missing, unknown, or of the wrong type.
    """
    most = most or {}
    known = {**required, **{key: type(value) for key, value in optional.items()}}
    for key in given:
        if key not in known:
            raise RuleError(
                rule=f"a shape of {operator} has the keys {list(known)}",
                value=key,
                remedy="Remove or rename the key.",
            )
    shape: Shape = {}
    for key, kind in known.items():
        if key not in given:
            if key in required:
                raise RuleError(
                    rule=f"a shape of {operator} needs {key}", value=dict(given), remedy=f"Add {key}."
                )
            shape[key] = optional[key]
            continue
        value: Any = given[key]
        if isinstance(value, bool) is not (kind is bool) or not isinstance(value, kind):
            raise RuleError(
                rule=f"{key} of {operator} must be of type {kind.__name__}",
                value=value,
                remedy="Correct the value.",
            )
        if kind is int and given[key] < 1:
            raise RuleError(rule=f"{key} of {operator} must be at least 1", value=value, remedy="Raise it.")
        if kind is int and given[key] > (limit := most.get(key, MOST)):
            raise RuleError(
                rule=f"{key} of {operator} must be at most {limit}", value=value, remedy="Lower it."
            )
        shape[key] = value
    return shape
