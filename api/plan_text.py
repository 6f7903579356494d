"""Parts of a plan in words, the same on the terminal and on the page."""

from __future__ import annotations

from typing import Any

from api.units import bytes_text, count_text


def fitting_lines(what: Any) -> list[str]:
    """What would fit, one line an option, whatever form the planner gives it."""
    if isinstance(what, dict):
        return [f"{key.replace('_', ' ')}: {_option_text(value, key)}" for key, value in what.items()]
    if isinstance(what, list):
        return [_option_text(item) for item in what]
    return [str(what)]


def _option_text(value: Any, key: str = "") -> str:
    if value is None:
        return "none found"
    if isinstance(value, dict):
        return ", ".join(
            f"{name.replace('_', ' ')} {_option_text(item, name)}" for name, item in value.items()
        )
    if isinstance(value, list):
        return "; ".join(_option_text(item) for item in value)
    if "_bytes" in key and isinstance(value, (int, float)):
        return bytes_text(value)
    return count_text(value) if isinstance(value, int) and not isinstance(value, bool) else str(value)


def ranked_launches(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """The chosen launch and its runners-up, in one form."""
    memory = plan["memory"]
    chosen = {
        "verdict": plan["verdict"],
        "launch": plan["launch"],
        "step_time_s": plan["step_time"]["total_s"],
        "footprint_bytes": memory["footprint_bytes"],
        "host_bytes_per_node": memory["host_bytes_per_node"],
    }
    return [chosen, *plan["alternatives"]]
