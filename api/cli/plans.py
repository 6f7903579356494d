"""``flatpeak plan list`` and ``flatpeak plan show``: the plans that were kept."""

from __future__ import annotations

from typing import Annotated

import typer

from api.cli.console import DatabaseOption, JsonFlag, emit_json, out, table
from api.cli.plan import plan_text
from api.units import seconds_text

PlanId = Annotated[str, typer.Argument(metavar="PLAN_ID", help="As `flatpeak plan list` shows it.")]


def show_all(
    limit: Annotated[int, typer.Option("--limit", min=1, max=500, help="Most plans to list.")] = 20,
    database: DatabaseOption = None,
    as_json: JsonFlag = False,
) -> None:
    """List the plans that were kept, newest first.

    Example:

      flatpeak plan list --limit 5
    """
    from api.services.planning import list_plans
    from api.services.store import open_database

    store = open_database(database)
    with store.reading() as session:
        page = list_plans(session, cursor=None, limit=limit)
    store.close()
    if as_json:
        emit_json(page.model_dump())
        return
    rows = [
        (
            one.id,
            one.model,
            one.cluster,
            f"{one.context_tokens:,}" if one.context_tokens else "–",
            one.verdict.replace("_", " "),
            seconds_text(one.total_s),
        )
        for one in page.items
    ]
    columns = ("id", "model", "cluster", "context", "verdict", "step")
    out.print(table("Plans", columns, rows, numeric=(3, 5)))


def show(plan_id: PlanId, database: DatabaseOption = None, as_json: JsonFlag = False) -> None:
    """Show a plan that was kept.

    Example:

      flatpeak plan show pln_01jx…
    """
    from api.services.planning import get_plan
    from api.services.store import open_database

    store = open_database(database)
    try:
        with store.reading() as session:
            plan = get_plan(session, plan_id)
    finally:
        store.close()
    if as_json:
        emit_json(plan)
    else:
        out.print(plan_text(plan))
