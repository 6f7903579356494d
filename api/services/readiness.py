"""What the service can do now: an honest answer, found by trying."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sqlalchemy.orm import Session

from api.errors import broken_rule
from api.schemas.catalog import Readiness
from cost_model.errors import RuleError
from cost_model.presets import PRESET_NAMES, preset
from cost_model.rates_default import default_cost_model
from db.lifecycle import SweepState
from db.repositories import CostModelRepository, SweepRepository
from db.session import Database

_COUNTED = 500


def readiness(database: Database) -> Readiness:
    """Asks the database, builds every preset and prices it, and says what the answers rest on."""
    presets, shipped = [], {}
    for name in PRESET_NAMES:
        cluster = preset(name, 1)
        cost = default_cost_model(cluster)
        if cost.rates:
            presets.append(name)
            shipped[name] = cost.hardware_id
    stored, fitted = _database(database)
    ready = bool(stored["ok"]) and bool(presets)
    return Readiness(
        ready=ready,
        database=stored,
        presets=presets,
        cost_models={"shipped": shipped, "fitted": fitted},
        covers=(
            "Plans for the presets from shipped rates (datasheet figures and one- and two-GPU H200 measurements), "
            f"and for {len(fitted)} measured kind(s) of hardware from their own fits. Sweeps are queued here; "
            "a worker process runs them."
        ),
    )


def _database(database: Database) -> tuple[dict[str, Any], list[str]]:
    try:
        with database.reading() as session:
            page = CostModelRepository(session).page(limit=_COUNTED)
            fitted = sorted({row.hardware_id for row in page.items if row.promoted})
            SweepRepository(session).active()
    except RuleError as error:
        broken = broken_rule(error)
        assert broken is not None
        return {"ok": False, "rule": broken[0], "remedy": broken[2]}, []
    return {"ok": True, "kind": database.dialect}, fitted


def sweep_counts(session: Session) -> dict[str, int]:
    """Sweeps by state, among the newest ones."""
    counts = dict.fromkeys((state.value for state in SweepState), 0)
    counts.update(Counter(row.state for row in SweepRepository(session).page(limit=_COUNTED).items))
    return counts


def trial_counts(session: Session) -> dict[str, int]:
    """Trials by state, over the sweeps that may have work."""
    sweeps = SweepRepository(session)
    total: Counter[str] = Counter()
    for counts in sweeps.counts_of([row.id for row in sweeps.active()]).values():
        total.update(counts)
    return dict(total)
