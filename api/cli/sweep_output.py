"""How a sweep and its trials are printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from api.cli.console import emit_json, facts, out, table
from api.units import bytes_text, reason_text, seconds_text

if TYPE_CHECKING:
    from api.schemas.sweeps import Sweep, Trial
    from db.session import Database

SHOWN = 20
_MOST_OF_A_REASON = 300
_MOST_TRIALS = 100_000


def report(store: Database, sweep_id: str, *, as_json: bool, most: int | None = SHOWN) -> None:
    """A sweep and its trials, fastest first: at most so many in the table, and all of them in JSON."""
    from api.services.sweeps import get_sweep, list_trials

    with store.reading() as session:
        sweep = get_sweep(session, sweep_id)
        trials = list_trials(session, sweep_id, cursor=None, limit=_MOST_TRIALS, states=set(), knobs={}).items
    if as_json:
        emit_json({**sweep.model_dump(), "items": [trial.model_dump() for trial in trials]})
        return
    out.print(facts(f"{sweep.id}  {sweep.name}", _facts(sweep, trials)))
    trials.sort(key=lambda t: (t.latency_s is None, t.latency_s or 0.0, t.number))
    shown = trials if most is None else trials[:most]
    _print_trials(shown, of=len(trials))
    if len(shown) < len(trials):
        out.print(
            f"{len(trials) - len(shown)} more: flatpeak sweep show {sweep_id} --all (or --limit N, --json)",
            markup=False,
            soft_wrap=True,
        )


def target_text(sweep: Sweep) -> str:
    """Ranks and device; over how many nodes, or of which group a loopback sweep plays one rank."""
    target = sweep.spec.get("target", {})
    if (group := target.get("loopback")) is not None:
        return f"1 of {group} × {sweep.device} (loopback)"
    nodes = target.get("nodes", 1)
    return f"{sweep.ranks} × {sweep.device}" + (f" on {nodes} nodes" if nodes > 1 else "")


def state_text(sweep: Sweep) -> str:
    """The state; of a running sweep also that nobody works on it."""
    return f"{sweep.state} (nobody works on it)" if sweep.worked_on is False else sweep.state


def _facts(sweep: Sweep, trials: list[Trial]) -> list[tuple[str, str]]:
    counts = ", ".join(f"{state} {number}" for state, number in sorted(sweep.trials.items())) or "none"
    shape = " ".join(f"{key}={value}" for key, value in sweep.spec.get("shape", {}).items())
    cap = sweep.memory_limit_bytes
    limit = (
        bytes_text(cap) if cap is not None else "the card" if sweep.device == "cuda" else "its share of RAM"
    )
    pairs = [
        ("state", state_text(sweep)),
        ("operator", f"{sweep.operator} ({sweep.provider})"),
        ("target", target_text(sweep) + (f", only {sweep.hardware_id}" if sweep.hardware_id else "")),
        ("shape", shape),
        ("strategy", f"{sweep.strategy}, at most {sweep.max_trials} launches"),
        ("memory of a rank", limit),
        ("trials", counts),
    ]
    if sweep.reason:
        pairs.append(("reason", reason_text(sweep.reason)))
    if flagged := sum(bool(trial.flags) for trial in trials):
        doubt = f"{flagged} trials: their times are in doubt (the machine was not theirs alone)"
        pairs.append(("flagged", doubt))
    over = [
        t.peak_bytes - t.bound_bytes
        for t in trials
        if t.peak_bytes is not None and t.bound_bytes is not None and t.peak_bytes > t.bound_bytes
    ]
    if over:
        much = f"{len(over)} of the peaks exceed theirs, by at most {bytes_text(max(over))}"
        pairs.append(("bounds", much))
    return pairs


def _print_trials(trials: list[Trial], of: int) -> None:
    knobs = list(dict.fromkeys(name for trial in trials for name in trial.config))
    flagged = any(trial.flags for trial in trials)
    rows = [
        (
            str(t.number),
            *(str(t.config.get(name, "–")) for name in knobs),
            t.state,
            seconds_text(t.latency_s),
            bytes_text(t.peak_bytes),
            bytes_text(t.bound_bytes),
            *((", ".join(sorted({one.flag for one in t.flags})),) if flagged else ()),
            reason_text(t.reason, _MOST_OF_A_REASON),
        )
        for t in trials
    ]
    columns = ("#", *knobs, "state", "latency", "peak", "bound", *(("flags",) if flagged else ()), "reason")
    title = "Trials" if len(trials) == of else f"Trials, the first {len(trials)} of {of}"
    out.print(table(title, columns, rows))
