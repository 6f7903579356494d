"""``flatpeak replay``: strategies compared on a recorded sweep, without launching anything."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.cli.console import DatabaseOption, JsonFlag, emit_json, out, table
from api.errors import NotFound, RuleError
from api.units import bytes_text, seconds_text

if TYPE_CHECKING:
    import pandas as pd

    from tuner.replaying.replay import Summary
    from tuner.replaying.table import Table


class Named(StrEnum):
    """Strategies by name."""

    MODEL = "model"
    TPE = "tpe"
    GP = "gp"
    RANDOM = "random"
    GRID = "grid"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("replay")(replay)


def replay(
    *,
    source: Annotated[
        str, typer.Argument(metavar="SWEEP_ID|FILE", help="A stored sweep, or a CSV file of samples.")
    ],
    strategy: Annotated[
        list[Named] | None, typer.Option("--strategy", help="Repeatable; default: all of them.")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, max=1000, help="Runs of each strategy.")] = 20,
    trials: Annotated[int, typer.Option("--trials", min=1, max=10_000, help="Most launches of a run.")] = 16,
    memory_limit_bytes: Annotated[
        int | None, typer.Option("--memory-limit-bytes", min=1, help="Of one rank; default: all points fit.")
    ] = None,
    no_bounds: Annotated[
        bool, typer.Option("--no-bounds", help="Let strategies run into the limit: Eq. 6 rules nothing out.")
    ] = False,
    where: Annotated[
        list[str] | None,
        typer.Option("--where", metavar="KEY=VALUE", help="Only points with this knob; repeatable."),
    ] = None,
    database: DatabaseOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Replay strategies over a recorded sweep, and say how soon each finds the best point.

    Example:

      flatpeak replay samples.csv --strategy model --strategy random --trials 8

    A launch draws its repeats anew from the recorded ones, so seeds differ. Every operator, provider and shape of
    the file is replayed for itself.

    Columns: launches until a point within 2 % of the best one was found (median of the seeds, and the worst of
    them); launches made; launches of points over the limit (median, and the most of any seed); how far the point
    recommended in the end lies above the best.
    """
    from tuner.replaying.replay import STRATEGIES, Options
    from tuner.replaying.replay import replay as run
    from tuner.replaying.table import tables

    options = Options(trials=trials, limit_bytes=memory_limit_bytes, bounds="none" if no_bounds else "rule")
    samples = _samples(source, database)
    wanted = dict(_pair(text) for text in where or [])
    _check_knobs(samples, wanted)
    found = tables(samples, where=wanted)
    if not found:
        raise RuleError(
            rule="a replay needs a sweep of two points or more",
            value=" ".join([source, *(f"--where {text}" for text in where or [])]),
            remedy="Leave out some --where."
            if wanted
            else "Record a grid sweep first: `flatpeak sweep FILE`.",
        )
    summaries = [
        (one, run(one, name, options, seeds=range(seeds)))
        for one in found
        for name in strategy or map(Named, STRATEGIES)
    ]
    if as_json:
        emit_json({"within": 0.02, "items": [summary.to_json() for _, summary in summaries]})
        return
    for one in found:
        _print(one, [summary for other, summary in summaries if other is one])


def _samples(source: str, database: str | None) -> pd.DataFrame:
    from tuner.replaying.table import read_samples

    if Path(source).exists():
        return read_samples(Path(source))
    if not source.startswith("swp_"):
        raise RuleError(
            rule="a replay takes a CSV file of samples, or the id of a stored sweep (swp_…)",
            value=source,
            remedy="There is no such file, and it is no id. Check the path; `flatpeak sweep list` lists the ids.",
        )
    from api.services.store import open_database
    from db.repositories import SampleRepository, SweepRepository

    store = open_database(database)
    try:
        with store.reading() as session:
            if SweepRepository(session).find(source) is None:
                raise NotFound("sweep", source)
            return SampleRepository(session).frame(sweep_id=source)
    finally:
        store.close()


def _pair(text: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not (key and sign):
        raise RuleError(
            rule="--where takes KEY=VALUE", value=text, remedy="For example --where engine=stream."
        )
    return key, value


def _check_knobs(samples: pd.DataFrame, wanted: dict[str, str]) -> None:
    """Refuse a --where that no point can meet: an unknown knob, or a value that was not recorded."""
    from tuner.replaying.table import json_object

    configs = [json_object(str(text)) for text in samples["config_json"].unique()]
    for key, value in wanted.items():
        known = list(dict.fromkeys(str(config[key]) for config in configs if key in config))
        if value in known:
            continue
        knobs = ", ".join(sorted({name for config in configs for name in config})) or "none"
        raise RuleError(
            rule=f"--where {key} takes a value that was recorded"
            if known
            else "--where names a recorded knob",
            value=f"{key}={value}",
            remedy=f"Choose among {', '.join(known[:50])}." if known else f"Knobs there are: {knobs}.",
        )


def _print(one: Table, summaries: list[Summary]) -> None:
    first = summaries[0]
    best = ", ".join(f"{key}={value}" for key, value in first.best_config.items())
    out.print(f"{one.name} on {one.hardware_id}", markup=False)
    limit = "" if first.limit_bytes is None else f" within {bytes_text(first.limit_bytes)}"
    out.print(
        f"{first.feasible} of {first.points} points{limit}; best: {best}, {seconds_text(first.best_latency_s)}",
        markup=False,
    )
    rows: list[tuple[Any, ...]] = [
        (
            s.strategy,
            "never" if s.reached_median > s.trials else f"{s.reached_median:g}",
            "never" if s.reached_worst > s.trials else str(s.reached_worst),
            f"{s.launched_median:g}",
            f"{s.infeasible_median:g}",
            str(s.infeasible_most),
            f"{100 * s.final_regret_median:.1f} %",
        )
        for s in summaries
    ]
    columns = ("strategy", "within 2 % after", "worst", "launched", "infeasible", "most", "above best")
    title = f"Median of {first.seeds} seeds, at most {first.trials} launches"
    out.print(table(title, columns, rows, numeric=range(1, 7)))
