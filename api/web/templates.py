"""Templates: one environment, the filters pages use, and what every page needs."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from api.auth import COOKIE
from api.units import bytes_text, count_text, seconds_text

FINISHED = ("succeeded", "infeasible", "failed", "pruned", "cancelled")


def _words(name: object) -> str:
    return str(name).replace("_", " ")


def _when(text: str | None) -> str:
    return "–" if not text else datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M UTC")


def _finished(counts: dict[str, int]) -> int:
    return sum(counts.get(state, 0) for state in FINISHED)


def _megahertz(value: float | None) -> str:
    return "–" if value is None else f"{value / 1e6:,.0f} MHz"


def _watts(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f} W"


def _json(value: object) -> str:
    return json.dumps(value, indent=2)


def _environment() -> Environment:
    built = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    built.filters.update(
        bytes=bytes_text,
        seconds=seconds_text,
        count=count_text,
        words=_words,
        when=_when,
        finished=_finished,
        json=_json,
        megahertz=_megahertz,
        watts=_watts,
    )
    return built


_TEMPLATES = _environment()


def render(request: Request, name: str, context: dict[str, Any], *, status: int = 200) -> HTMLResponse:
    """A page; ``section`` in the context marks its place in the navigation."""
    body = _TEMPLATES.get_template(name).render(
        {
            "section": "",
            "version": request.app.version,
            "signed_in": bool(request.app.state.settings.tokens_required and request.cookies.get(COOKIE)),
            **context,
        }
    )
    return HTMLResponse(body, status_code=status)
