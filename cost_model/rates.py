"""CostModel: the named rates a prediction is made of, each with its interval and where it came from."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from cost_model.errors import RuleError
from cost_model.provenance import Estimate, Provenance

Unit = Literal["s", "B/s", "FLOP/s", "params/s", "rows", "passes", "share"]
_TRUST: tuple[Provenance, ...] = ("measured", "interpolated", "transferred", "analytic")
_TRANSFER_LOG_WIDTH = math.log(2.0)
"""Another machine's rate is believed to within a factor of two on top of its own interval."""
_SOFTWARE_LOG_WIDTH = math.log(1.25)


@dataclass(frozen=True, slots=True)
class Rate:
    """One constant of the latency model. ``low`` and ``high`` bound it at 90 %; all three are positive."""

    value: float
    low: float
    high: float
    provenance: Provenance
    unit: Unit
    note: str = ""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("provenance", self.provenance, _TRUST),
            ("unit", self.unit, get_args(Unit)),
        ):
            if value not in known:
                raise RuleError(
                    rule=f"{name} of a rate is one of {', '.join(known)}",
                    value=value,
                    remedy="Use one of them.",
                )
        if not 0 < self.low <= self.value <= self.high or not math.isfinite(self.high):
            raise RuleError(
                rule="a rate needs 0 < low <= value <= high < infinity",
                value=(self.low, self.value, self.high),
                remedy="Give a positive value inside its own interval.",
            )

    def widened(self, log_width: float, provenance: Provenance, note: str) -> Rate:
        """The same value with ``log_width`` added to both sides of its interval on a log scale."""
        factor = math.exp(log_width)
        kept = self.note + "; " if self.note else ""
        high = self.high * factor
        if self.unit == "share":
            high = max(self.value, min(1.0, high))
        return Rate(self.value, self.low / factor, high, provenance, self.unit, kept + note)


def less_trusted(first: Provenance, second: Provenance) -> Provenance:
    """The weaker of two provenances: a figure is worth what its worst input is worth."""
    return max(first, second, key=_TRUST.index)


class RateView:
    """Reads rates by name and remembers which were asked for, so that an Estimate can name its sources."""

    __slots__ = ("_override", "_rates", "_scales", "used")

    def __init__(
        self,
        rates: Mapping[str, Rate],
        override: tuple[str, float] | None = None,
        scales: Mapping[str, float] | None = None,
    ) -> None:
        self._rates = rates
        self._override = override
        self._scales = scales or {}
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> float:
        self.used.add(name)
        if self._override is not None and self._override[0] == name:
            return self._override[1]
        try:
            return self._rates[name].value
        except KeyError:
            raise RuleError(
                rule="a cost model holds every rate its formulas name",
                value=name,
                remedy="Start from default_cost_model(cluster), which has all of them, and replace single rates.",
            ) from None

    def scale(self, key: str) -> float:
        """Correction factor of ``operator:pass``: fitted for the pass, or for the whole step, or 1."""
        operator = key.split(":", maxsplit=1)[0]
        for name in (key, f"{operator}:step", f"{operator}:forward_backward"):
            if name in self._scales:
                return self._scales[name]
        return 1.0

    def names(self) -> tuple[str, ...]:
        """Every rate there is."""
        return tuple(self._rates)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Named rates of one kind of node, versioned; what was measured, and how far predictions were off.

    Attributes:
        hardware_id: fingerprint of the cluster the rates hold for (``ClusterSpec.hardware_id``).
        software: driver, torch, NCCL, allocator settings as far as known (``""`` when from datasheets only).
        rates: name to Rate; names ending in ``_s`` are seconds.
        scales: ``operator:pass`` to the factor by which the formula missed the measured medians.
        spreads: ``operator:pass`` to the half width, on a log scale, that held-out errors stayed within.
        coverage: operator to feature to (lowest, highest) value measured; empty for a datasheet model.
        facts: datasheet figures of the card, by which rates are carried over to another one.
    """

    id: str
    version: int
    hardware_id: str
    software: str
    created: str
    rates: Mapping[str, Rate]
    scales: Mapping[str, float] = field(default_factory=dict)
    spreads: Mapping[str, float] = field(default_factory=dict)
    coverage: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    facts: Mapping[str, float] = field(default_factory=dict)
    parent_id: str | None = None

    def view(self, override: tuple[str, float] | None = None) -> RateView:
        """A reader of the central values."""
        return RateView(self.rates, override, self.scales)

    def estimate(
        self,
        formula: Callable[[RateView], float],
        *,
        spread: float = 0.0,
        extra_log_width: float = 0.0,
        provenance: Provenance | None = None,
        note: str = "",
    ) -> Estimate:
        """Evaluates ``formula`` with an interval.

        Every rate the formula reads is moved to the ends of its interval one at a time; the changes add in
        quadrature on a log scale, with ``spread`` (of held-out errors) and ``extra_log_width`` (of what lies
        outside the measured region; it also lowers the provenance to ``transferred``). ``provenance`` replaces
        the weakest among the rates read, where the formula as a whole was held against measurements.
        """
        view = self.view()
        value = float(formula(view))
        if provenance is None:
            provenance = "measured" if view.used else "analytic"
            for name in view.used:
                provenance = less_trusted(provenance, self.rates[name].provenance)
        if value <= 0:
            return Estimate(0.0, 0.0, 0.0, provenance, note=note)
        up = down = spread**2 + extra_log_width**2
        for name in sorted(view.used):
            rate = self.rates[name]
            if rate.low == rate.high:
                continue
            ends = [float(formula(self.view((name, end)))) / value for end in (rate.low, rate.high)]
            up += max(0.0, *(math.log(max(end, 1e-12)) for end in ends)) ** 2
            down += min(0.0, *(math.log(max(end, 1e-12)) for end in ends)) ** 2
        if extra_log_width > 0:
            provenance = less_trusted(provenance, "transferred")
        return Estimate(
            value, value * math.exp(-math.sqrt(down)), value * math.exp(math.sqrt(up)), provenance, note=note
        )

    def with_rates(self, changed: Mapping[str, Rate], **fields: Any) -> CostModel:
        """A next version holding ``changed`` rates, with an id of its own and this one as its parent."""
        merged = {**self.rates, **changed}
        body = replace(self, rates=merged, version=self.version + 1, parent_id=self.id, **fields)
        return replace(body, id=content_id(body))

    def transferred_to(self, hardware_id: str, facts: Mapping[str, float]) -> CostModel:
        """The rates carried over to other hardware: scaled by datasheet ratios, widened, marked ``transferred``.

        Scales, spreads and coverage stay behind: they are facts about the machine that was measured.
        """
        note = f"carried over from {self.hardware_id}"
        carried: dict[str, Rate] = {}
        for name, rate in self.rates.items():
            factor = 1.0
            if rate.unit == "FLOP/s":
                factor = facts.get("peak_flops", 1.0) / self.facts.get(
                    "peak_flops", facts.get("peak_flops", 1.0)
                )
            elif name == "hbm_bytes_per_s":
                there = facts.get("hbm_bytes_per_s", 1.0)
                factor = there / self.facts.get("hbm_bytes_per_s", there)
            moved = Rate(
                rate.value * factor,
                rate.low * factor,
                rate.high * factor,
                rate.provenance,
                rate.unit,
                rate.note,
            )
            weakest = less_trusted(rate.provenance, "transferred")
            carried[name] = moved.widened(_TRANSFER_LOG_WIDTH, weakest, note)
        body = replace(
            self,
            hardware_id=hardware_id,
            rates=carried,
            scales={},
            spreads={},
            coverage={},
            facts=dict(facts),
            parent_id=self.id,
        )
        return replace(body, id=content_id(body))

    def under_software(self, software: str) -> CostModel:
        """The same rates read under other software: a little wider, and said so."""
        if not self.software or software == self.software:
            return self
        note = f"measured under {self.software}"
        widened = {n: r.widened(_SOFTWARE_LOG_WIDTH, r.provenance, note) for n, r in self.rates.items()}
        return self.with_rates(widened)

    def to_json(self) -> dict[str, Any]:
        """A JSON object that ``from_json`` reads back to an equal model."""
        return {
            "id": self.id,
            "version": self.version,
            "hardware_id": self.hardware_id,
            "software": self.software,
            "created": self.created,
            "parent_id": self.parent_id,
            "rates": {
                name: {
                    "value": r.value,
                    "low": r.low,
                    "high": r.high,
                    "provenance": r.provenance,
                    "unit": r.unit,
                    "note": r.note,
                }
                for name, r in sorted(self.rates.items())
            },
            "scales": dict(sorted(self.scales.items())),
            "spreads": dict(sorted(self.spreads.items())),
            "coverage": {
                op: {k: list(v) for k, v in sorted(box.items())} for op, box in sorted(self.coverage.items())
            },
            "facts": dict(sorted(self.facts.items())),
        }

    @staticmethod
    def from_json(body: Mapping[str, Any]) -> CostModel:
        """Reads what ``to_json`` wrote.

        Raises:
            RuleError: a key is missing or a rate is not a rate.
        """
        try:
            model = CostModel(
                id=str(body["id"]),
                version=int(body["version"]),
                hardware_id=str(body["hardware_id"]),
                software=str(body["software"]),
                created=str(body["created"]),
                parent_id=body.get("parent_id"),
                rates={name: Rate(**entry) for name, entry in body["rates"].items()},
                scales={k: float(v) for k, v in body.get("scales", {}).items()},
                spreads={k: float(v) for k, v in body.get("spreads", {}).items()},
                coverage={
                    op: {k: (float(v[0]), float(v[1])) for k, v in box.items()}
                    for op, box in body.get("coverage", {}).items()
                },
                facts={k: float(v) for k, v in body.get("facts", {}).items()},
            )
        except RuleError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise RuleError(
                rule="a cost model file has id, version, hardware_id, software, created and rates",
                value=f"{type(error).__name__}: {error}",
                remedy="Write it with CostModel.to_json.",
            ) from error
        model._check()
        return model

    def _check(self) -> None:
        """Refuse figures that no fit writes: they would only surface as nonsense in a plan."""
        for what, figures, least in (
            ("scales", self.scales, 0.0),
            ("facts", self.facts, 0.0),
            ("spreads", self.spreads, -math.ulp(0.0)),
        ):
            for name, value in figures.items():
                if not least < value < math.inf:
                    raise RuleError(
                        rule=f"{what}.{name} of a cost model must be {'positive' if least == 0 else 'at least 0'}"
                        " and finite",
                        value=value,
                        remedy="Write the file with CostModel.to_json.",
                    )


def content_id(model: CostModel) -> str:
    """``cm_`` and a digest of the rates: equal rates have equal ids on every machine."""
    body = model.to_json()
    for key in ("id", "created", "version", "parent_id"):
        body.pop(key)
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return f"cm_{digest[:24]}"
