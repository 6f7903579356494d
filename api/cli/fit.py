"""``flatpeak fit``: a cost model from what was measured, promoted only when it is better."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.cli.console import DatabaseOption, JsonFlag, emit_json, err, out, table
from api.cli.groups import group_of
from api.errors import NotFound, RuleError

if TYPE_CHECKING:
    import pandas as pd
    from sqlalchemy.orm import Session

    from cost_model.rates import CostModel


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(help="Fit a cost model; list the versions there are.")
    group.command("make")(fit)
    group.command("list")(show_all)
    app.add_typer(group, name="fit", cls=group_of("make", bare=True))


def fit(
    *,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", metavar="FILE", help="Figures to start from on hardware fitted for the first time."
        ),
    ] = None,
    hardware_id: Annotated[
        str | None, typer.Option("--hardware-id", help="Whose samples; default: this cluster's.")
    ] = None,
    sweep: Annotated[
        list[str] | None, typer.Option("--sweep", help="Only samples of this sweep; repeatable.")
    ] = None,
    without_flagged: Annotated[
        bool, typer.Option("--without-flagged", help="Leave out trials during which others used the machine.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Also save the cost model as JSON.")
    ] = None,
    database: DatabaseOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Fit the cost model of one kind of hardware to its samples.

    Example:

      flatpeak fit --cluster cluster.yaml

    A fit replaces the model in force only if it predicts held-out rows better. `flatpeak fit list` shows all versions.
    """
    from api.cli.export import write_whole
    from api.services.specs import cluster_from_text
    from api.services.store import open_database
    from cost_model.calibration import fit as fit_samples
    from tuner.routing.rows import with_routing

    machine = cluster_from_text(cluster, None) if cluster else None
    store = open_database(database)
    try:
        with store.reading() as session:
            found = _samples(session, sweep, without_flagged=without_flagged)
            wanted = _hardware(found, hardware_id or (machine.hardware_id if machine else None))
            samples = _current(found, wanted)
            prior, prior_from = _prior(session, wanted, machine)
            flagged = _flagged_rows(session, samples, wanted)
        result = fit_samples(with_routing(samples), prior, software=_software(samples, wanted))
        report: dict[str, Any] = finite(result.report.to_json())
        answer: dict[str, Any] = {
            "hardware_id": wanted,
            "promoted": result.report.promoted,
            "prior": prior_from,
            "rows": int((samples["hardware_id"] == wanted).sum()),
            "flagged_rows": flagged,
            "outdated_rows": int(
                (found["hardware_id"] == wanted).sum() - (samples["hardware_id"] == wanted).sum()
            ),
            "report": report,
            "cost_model_id": None,
        }
        if result.report.promoted:
            with store.session() as session:
                answer["cost_model_id"] = _store(session, wanted, result.cost_model, report)
        if output is not None:
            write_whole(output, json.dumps(result.cost_model.to_json(), indent=2) + "\n")
    finally:
        store.close()
    if as_json:
        emit_json(answer)
    else:
        _print(answer)


def show_all(
    limit: Annotated[int, typer.Option("--limit", min=1, max=500, help="Most versions to list.")] = 20,
    database: DatabaseOption = None,
    as_json: JsonFlag = False,
) -> None:
    """List cost models, newest first.

    Example:

      flatpeak fit list --limit 5
    """
    from api.services.catalog import list_cost_models
    from api.services.store import open_database

    store = open_database(database)
    with store.reading() as session:
        page = list_cost_models(session, cursor=None, limit=limit, hardware_id=None)
    store.close()
    if as_json:
        emit_json(page.model_dump())
        return
    rows = [
        (one.id, one.hardware_id, str(one.version), "yes" if one.promoted else "no", one.created_at or "")
        for one in page.items
    ]
    out.print(table("Cost models", ("id", "hardware", "version", "in force", "created"), rows, numeric=(2,)))


def _flagged_rows(session: Session, samples: pd.DataFrame, hardware_id: str) -> int:
    from db.repositories import SampleRepository

    flagged = SampleRepository(session).flagged_trials()
    rows = samples[samples["hardware_id"] == hardware_id]
    return int(rows["trial_id"].isin(flagged).sum())


def _samples(session: Session, sweeps: list[str] | None, *, without_flagged: bool) -> pd.DataFrame:
    import pandas as pd

    from db.repositories import SampleRepository, SweepRepository

    repository = SampleRepository(session)
    for sweep_id in sweeps or []:
        if SweepRepository(session).find(sweep_id) is None:
            raise NotFound("sweep", sweep_id)
    frames = [repository.frame(sweep_id=one) for one in sweeps] if sweeps else [repository.frame()]
    samples = pd.concat(frames, ignore_index=True)
    if without_flagged:
        samples = samples[~samples["trial_id"].isin(repository.flagged_trials())]
    if samples.empty:
        raise RuleError(
            rule="a fit needs samples of trials that succeeded",
            value=0,
            remedy="Run `flatpeak sweep FILE` first.",
        )
    return samples


def _current(samples: pd.DataFrame, hardware_id: str) -> pd.DataFrame:
    """Rows of the operators as they are now."""
    from tuner.rows.current_rows import current_rows

    rows = current_rows(samples)
    if not (rows["hardware_id"] == hardware_id).any():
        old = samples[samples["hardware_id"] == hardware_id]
        raise RuleError(
            rule="a fit needs samples of the operators' present versions",
            value=sorted(
                {f"{name} {one}" for name, one in zip(old["operator"], old["operator_version"], strict=True)}
            ),
            remedy="Run their sweeps again.",
        )
    return rows


def _hardware(samples: pd.DataFrame, wanted: str | None) -> str:
    found = sorted({str(one) for one in samples["hardware_id"]})
    if wanted is not None and wanted in found:
        return wanted
    if wanted is None and len(found) == 1:
        return found[0]
    raise RuleError(
        rule="a fit is of one kind of hardware that was measured",
        value=wanted or found,
        remedy=f"Choose with --hardware-id; measured are {', '.join(found)}.",
    )


def _prior(session: Session, hardware_id: str, machine: Any) -> tuple[CostModel, str]:
    from api.services.planning import cost_model_of
    from cost_model.cluster_file import read_cluster
    from cost_model.rates_default import default_cost_model
    from db.repositories import ClusterRepository, CostModelRepository

    row = CostModelRepository(session).current(hardware_id)
    if row is not None:
        return cost_model_of(row), row.id
    if machine is not None:
        return default_cost_model(machine), f"figures of {machine.name}"
    for stored in ClusterRepository(session).page(limit=500).items:
        if stored.hardware_id == hardware_id:
            return default_cost_model(read_cluster(stored.spec_json)), f"figures of {stored.name}"
    raise RuleError(
        rule="a first fit of a kind of hardware needs its cluster's figures",
        value=hardware_id,
        remedy="Run `flatpeak probe -o cluster.yaml`, then `flatpeak fit --cluster cluster.yaml`.",
    )


def _software(samples: pd.DataFrame, hardware_id: str) -> str:
    """The software of the newest rows, as text."""
    from tuner.machine.fingerprint import software_id

    rows = samples[samples["hardware_id"] == hardware_id]
    return software_id(json.loads(str(rows["software_json"].iloc[-1])))


def _store(session: Session, hardware_id: str, model: CostModel, report: dict[str, Any]) -> str:
    from db.repositories import CostModelRepository

    return CostModelRepository(session).add(hardware_id, model.to_json(), report=report, promoted=True).id


def finite(value: Any) -> Any:
    """JSON without NaN or infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def _print(answer: dict[str, Any]) -> None:
    verdict = (
        f"promoted as {answer['cost_model_id']}"
        if answer["promoted"]
        else "not promoted: the model in force stays"
    )
    out.print(f"{answer['hardware_id']}: {verdict}", markup=False)
    if answer["flagged_rows"]:
        err.print(
            f"Warning: {answer['flagged_rows']} of {answer['rows']} rows are of flagged trials: the machine was not "
            "theirs alone (`flatpeak sweep show`); --without-flagged leaves them out.",
            markup=False,
        )
    if answer["outdated_rows"]:
        err.print(
            f"{answer['outdated_rows']} rows of other versions of their operators were left out.",
            markup=False,
        )
    rows = [
        (
            item["operator"],
            str(item["rows"]),
            str(item["held_out"]),
            _error(item["median_error"]),
            _error(item["prior_error"]),
            "yes" if item["promoted"] else "no",
            item["message"],
        )
        for item in answer["report"]["operators"]
    ]
    columns = ("operator", "rows", "held out", "error", "before", "promoted", "")
    out.print(table("Median error on held-out rows", columns, rows, numeric=(1, 2, 3, 4)))
    for message in answer["report"]["messages"]:
        out.print(message, markup=False)


def _error(value: float | None) -> str:
    return "–" if value is None else f"{100 * (math.exp(value) - 1):.1f} %"
