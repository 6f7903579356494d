"""``flatpeak check``: the memory of a launch somebody else chose."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from api.cli.amounts import tokens_of
from api.cli.console import JsonFlag, emit_json, out, table
from api.cli.plan import (
    ActivationBytesOption,
    BatchOption,
    ClusterOption,
    ContextOption,
    ImbalanceOption,
    MigratedOption,
    ModelOption,
    NodesOption,
)
from api.units import bytes_text


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("check")(check)


def check(
    *,
    launch: Annotated[
        Path, typer.Argument(metavar="LAUNCH.json", help="An exported launch, or a plan that holds one.")
    ],
    model: ModelOption,
    cluster: ClusterOption,
    context: ContextOption,
    global_batch_tokens: BatchOption,
    nodes: NodesOption = None,
    imbalance: ImbalanceOption = 1.3,
    migrated_experts: MigratedOption = 0,
    activation_bytes: ActivationBytesOption = 2,
    as_json: JsonFlag = False,
) -> None:
    """Predict the memory of a given launch in both modes.

    Example:

      flatpeak check launch.json --model config.json --cluster hgx-h200 \\
        --context 131072 --global-batch-tokens 524288

    Exits with 1 when the launch does not fit in expected mode.
    """
    from api.services.specs import cluster_from_text, launch_from_mapping, model_from_file, read_mapping
    from cost_model.memory import MODES, memory_report
    from cost_model.workload import Workload

    spec = model_from_file(model)
    machine = cluster_from_text(cluster, nodes)
    workload = Workload(
        tokens_of(context, "--context"),
        tokens_of(global_batch_tokens, "--global-batch-tokens"),
        imbalance=imbalance,
        migrated_experts=migrated_experts,
        activation_bytes=activation_bytes,
    )
    knobs = launch_from_mapping(read_mapping(launch, "a launch file"))
    reports = {mode: memory_report(spec, machine, workload, knobs, mode=mode) for mode in MODES}
    if as_json:
        answer: dict[str, object] = {"launch": knobs.to_json()}
        answer.update({name: report.to_json() for name, report in reports.items()})
        emit_json(answer)
    else:
        names = list(next(iter(reports.values())).terms)
        rows = [
            (name.replace("_", " "), *(bytes_text(reports[mode].terms[name]) for mode in MODES))
            for name in names
        ]
        rows.append(("phase peak", *(bytes_text(reports[mode].phase_bytes) for mode in MODES)))
        rows.append(("footprint", *(bytes_text(reports[mode].footprint_bytes) for mode in MODES)))
        rows.append(("of a card's", *(bytes_text(reports[mode].hbm_bytes) for mode in MODES)))
        rows.append(("host per node", *(bytes_text(reports[mode].host_bytes_per_node) for mode in MODES)))
        rows.append(("verdict", *(reports[mode].verdict.replace("_", " ") for mode in MODES)))
        out.print(table("Memory of one GPU", ("term", *MODES), rows, numeric=(1, 2)))
    raise typer.Exit(1 if reports["expected"].verdict == "does_not_fit" else 0)
