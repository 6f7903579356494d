"""How a sweep and its trials are printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from api.cli.console import emit_json, facts, out, table
from api.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from db.session import Database

_SHOWN = 20


def report(store: Database, sweep_id: str, *, as_json: bool) -> None:
    """A sweep and its trials, fastest first."""
    from api.services.sweeps import get_sweep, list_trials

    with store.reading() as session:
        sweep = get_sweep(session, sweep_id)
        trials = list_trials(session, sweep_id, cursor=None, limit=10_000, states=set(), knobs={}).items
    if as_json:
        emit_json({**sweep.model_dump(), "items": [trial.model_dump() for trial in trials]})
        return
    counts = ", ".join(f"{state} {number}" for state, number in sorted(sweep.trials.items())) or "none"
    pairs = [("state", sweep.state), ("operator", f"{sweep.operator} ({sweep.provider})"), ("trials", counts)]
    if sweep.reason:
        pairs.append(("reason", sweep.reason))
    flagged = [trial for trial in trials if trial.flags]
    if flagged:
        pairs.append(
            ("flagged", f"{len(flagged)} trials: their times are in doubt (the machine was not theirs alone)")
        )
    out.print(facts(f"{sweep.id}  {sweep.name}", pairs))
    trials.sort(key=lambda t: (t.latency_s is None, t.latency_s or 0.0, t.number))
    knobs = list(dict.fromkeys(name for trial in trials for name in trial.config))
    rows = [
        (
            str(t.number),
            *(str(t.config.get(name, "–")) for name in knobs),
            t.state,
            seconds_text(t.latency_s),
            bytes_text(t.peak_bytes),
            bytes_text(t.bound_bytes),
            *((", ".join(sorted({one.flag for one in t.flags})),) if flagged else ()),
            (t.reason or "")[:60],
        )
        for t in trials[:_SHOWN]
    ]
    columns = ("#", *knobs, "state", "latency", "peak", "bound", *(("flags",) if flagged else ()), "reason")
    title = "Trials" if len(trials) <= _SHOWN else f"Trials, the first {_SHOWN} of {len(trials)}"
    out.print(table(title, columns, rows))
