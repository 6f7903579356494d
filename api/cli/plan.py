"""``flatpeak plan``: does it fit, what peaks, which launch parameters, how fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Group
from rich.text import Text

from api.cli.amounts import tokens_of
from api.cli.console import DatabaseOption, JsonFlag, emit_json, out, table
from api.cli.groups import group_of
from api.errors import RuleError
from api.plan_text import fitting_lines
from api.units import bytes_text, seconds_text
from cost_model.field_rules import rule_of

ModelOption = Annotated[
    Path, typer.Option("--model", metavar="CONFIG.json", help="A Hugging Face config.json, or a full spec.")
]
ClusterOption = Annotated[
    str,
    typer.Option("--cluster", metavar="PRESET|FILE", help="hgx-h200, hgx-h100, hgx-b200, or a cluster file."),
]
NodesOption = Annotated[int | None, typer.Option("--nodes", help="Nodes of the cluster.")]
ContextOption = Annotated[
    str, typer.Option("--context", metavar="TOKENS", help="Length of one sequence: 131072, or 128K.")
]
BatchOption = Annotated[
    str,
    typer.Option(
        "--global-batch-tokens", metavar="TOKENS", help="Tokens of one update, a multiple of the context."
    ),
]
ModeOption = Annotated[
    Literal["expected", "guarantee"],
    typer.Option("--mode", help="What the verdict rests on: the expected load, or a bound for any router."),
]
ImbalanceOption = Annotated[
    float, typer.Option("--imbalance", help="Largest over mean load of a rank (expected mode).")
]
MigratedOption = Annotated[
    int, typer.Option("--migrated-experts", help="Guest experts a rank holds in one layer.")
]
ActivationBytesOption = Annotated[
    int, typer.Option("--activation-bytes", help="Bytes of an activation scalar: 2 for bf16, 4 for float32.")
]
FixOption = Annotated[
    list[str] | None,
    typer.Option(
        "--fix", metavar="KEY=VALUE", help="Hold a launch key fast, e.g. --fix chunk_tokens=8K; repeatable."
    ),
]
_TOKEN_KEYS = ("max_tokens_per_rank", "chunk_tokens", "strip_rows")
_STYLES = {"fits": "bold green", "at_risk": "bold yellow", "does_not_fit": "bold red"}


def register(app: typer.Typer) -> None:
    """Add the commands."""
    from api.cli import plans

    group = typer.Typer(help="Plan a run; list and show the plans that were kept.")
    group.command("make")(plan)
    group.command("list")(plans.show_all)
    group.command("show")(plans.show)
    app.add_typer(group, name="plan", cls=group_of("make", bare=True))


def plan(
    *,
    model: ModelOption,
    cluster: ClusterOption,
    context: ContextOption,
    global_batch_tokens: BatchOption,
    nodes: NodesOption = None,
    mode: ModeOption = "expected",
    imbalance: ImbalanceOption = 1.3,
    migrated_experts: MigratedOption = 0,
    activation_bytes: ActivationBytesOption = 2,
    fix: FixOption = None,
    cost_model: Annotated[
        str | None,
        typer.Option("--cost-model", metavar="FILE|ID", help="Rates to plan with; default: the best known."),
    ] = None,
    database: DatabaseOption = None,
    save: Annotated[bool, typer.Option("--save", help="Keep the plan in the database.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Plan a run: the verdict, the launch parameters, memory and time term by term.

    Example:

      flatpeak plan --model config.json --cluster hgx-h200 --nodes 1 \\
        --context 131072 --global-batch-tokens 524288

    `flatpeak plan list` and `flatpeak plan show PLAN_ID` read what --save has kept.
    With --database, what sweeps measured on exactly this hardware stands in for the model where the shape is the
    same. Exits with 1 when nothing fits, and says what would.
    """
    from api.services.planning import PlanInputs, best_cost_model, compute_plan, measured_points, save_plan
    from api.services.specs import cluster_from_text, model_from_file
    from api.services.store import database_in_use, open_database
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
    pins, measured = pins_from_words(fix or []), None
    store = open_database(database) if save or database or database_in_use(database) else None
    try:
        if cost_model is not None:
            cost = _cost_model(cost_model, store)
        elif store is not None:
            with store.reading() as session:
                cost = best_cost_model(session, machine)
        else:
            cost = best_cost_model(None, machine)
        if store is not None:
            with store.reading() as session:
                measured = measured_points(session, machine)
        answer = compute_plan(PlanInputs(spec, machine, workload, cost, mode, pins, measured))
        if save and store is not None:
            with store.session() as session:
                answer = save_plan(session, answer)
    finally:
        if store is not None:
            store.close()
    if as_json:
        emit_json(answer)
    else:
        out.print(plan_text(answer))
    raise typer.Exit(1 if answer["verdict"] == "does_not_fit" else 0)


def pins_from_words(words: list[str]) -> dict[str, Any]:
    """``--fix`` words as launch keys with checked values.

    Raises:
        RuleError: a word is no KEY=VALUE, a key is no launch key, or a value is out of its range.
    """
    from pydantic import ValidationError

    from api.schemas.plans import PinsBody

    pairs = dict(word.split("=", 1) for word in words if "=" in word)
    if len(pairs) != len(words):
        raise RuleError(
            rule="--fix takes KEY=VALUE, each key once",
            value=words,
            remedy="For example --fix expert_degree=8 --fix optimizer_engine=stream.",
        )
    unknown = [key for key in pairs if key not in PinsBody.model_fields]
    if unknown:
        raise RuleError(
            rule="--fix holds launch keys fast",
            value=unknown[0],
            remedy=f"Choose among {', '.join(PinsBody.model_fields)}.",
        )
    values: dict[str, Any] = {
        key: tokens_of(text, f"--fix {key}") if key in _TOKEN_KEYS else text for key, text in pairs.items()
    }
    try:
        return PinsBody.model_validate(values).given()
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        raise RuleError(
            rule=f"--fix {key} {rule_of(first)}", value=pairs[key], remedy=f"Give {key} another value."
        ) from None


def _cost_model(text: str, store: Any) -> Any:
    from api.services.planning import cost_model_from_file, stored_cost_model

    if Path(text).exists() or Path(text).suffix:
        return cost_model_from_file(Path(text))
    if store is None:
        raise RuleError(
            rule="a cost model's id needs the database that holds it",
            value=text,
            remedy="Give --database, or the path of a cost model file.",
        )
    with store.reading() as session:
        return stored_cost_model(session, text)


def plan_text(plan: dict[str, Any]) -> Group:
    """A plan as tables."""
    parts: list[Any] = [_headline(plan)]
    parts += [Text(f"Warning: {warning}", style="yellow") for warning in plan.get("warnings") or []]
    if plan.get("what_would_fit"):
        parts.append(Text("\nWhat would fit", style="bold"))
        parts.extend(Text(f"  {line}") for line in fitting_lines(plan["what_would_fit"]))
    if plan.get("launch"):
        parts += [Text(), table("Launch", ("knob", "value"), _launch_rows(plan["launch"]), numeric=(1,))]
    if plan.get("memory"):
        parts += [Text(), _memory(plan)]
    if plan.get("step_time"):
        parts += [Text(), _step(plan["step_time"])]
    if plan.get("alternatives"):
        parts += [Text(), _alternatives(plan["alternatives"])]
    return Group(*parts)


def _headline(plan: dict[str, Any]) -> Text:
    verdict = plan["verdict"]
    memory, step = plan.get("memory") or {}, plan.get("step_time") or {}
    style = _STYLES.get(verdict, "bold")
    line = Text(
        verdict.replace("_", " "), style=style, no_wrap=True, overflow="ignore"
    )  # scripts read one line
    line.append(f"  in {plan['mode']} mode", style="not bold default")
    if memory.get("footprint_bytes") is not None:
        line.append(
            f": {bytes_text(memory['footprint_bytes'])} of {bytes_text(memory['hbm_bytes'])} per GPU",
            style="not bold default",
        )
    if step.get("total_s") is not None:
        low, high = step["interval_s"]
        line.append(
            f", {seconds_text(step['total_s'])} a step ({seconds_text(low)} to {seconds_text(high)})",
            style="not bold default",
        )
    return line


def _launch_rows(launch: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for key, value in launch.items():
        text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
        rows.append((key, f"{text} ({bytes_text(value)})" if key.endswith("_bytes") else text))
    return rows


def _memory(plan: dict[str, Any]) -> Any:
    memory = plan["memory"]
    rows = [(name.replace("_", " "), bytes_text(value)) for name, value in memory["terms"].items() if value]
    totals = ("bound_bytes", "expected_bytes", "phase_bytes", "footprint_bytes", "hbm_bytes")
    rows += [
        (f"{name.removesuffix('_bytes')} =", bytes_text(memory[name])) for name in totals if name in memory
    ]
    if memory.get("host_bytes_per_node") is not None:
        host = f"{bytes_text(memory['host_bytes_per_node'])} of {bytes_text(memory['host_limit_bytes'])}"
        rows.append(("host memory per node =", host))
    binding = plan.get("binding") or {}
    title = "Memory of one GPU"
    if binding.get("live_set"):
        following = binding.get("next") or {}
        second = f", next {following['live_set'].replace('_', ' ')}" if following.get("live_set") else ""
        title += f" (binding: {str(binding['live_set']).replace('_', ' ')}{second})"
    return table(title, ("term", "bytes"), rows, numeric=(1,))


def _step(step: dict[str, Any]) -> Any:
    total = step["total_s"] or 1.0
    rows = [
        (name.replace("_", " "), seconds_text(value), f"{100 * value / total:.1f} %")
        for name, value in sorted(step["terms"].items(), key=lambda item: -item[1])
        if value
    ]
    return table("Step time", ("term", "seconds", "share"), rows, numeric=(1, 2))


def _alternatives(alternatives: list[dict[str, Any]]) -> Any:
    rows = [alternative_row(item) for item in alternatives[:8]]
    return table(
        "Alternatives",
        ("D", "E_p", "P", "c", "K_max", "engine", "memory", "step", "verdict"),
        rows,
        numeric=range(5),
    )


def alternative_row(item: dict[str, Any]) -> tuple[str, ...]:
    """One runner-up as text: degrees, chunks, engine, memory, time, verdict."""
    launch = item["launch"]
    keys = (
        "sequence_degree",
        "expert_degree",
        "vocab_degree",
        "chunk_tokens",
        "max_chunks",
        "optimizer_engine",
    )
    return (
        *(str(launch.get(key, "–")) for key in keys),
        bytes_text(item["footprint_bytes"]),
        seconds_text(item["step_time_s"]),
        str(item.get("verdict", "–")).replace("_", " "),
    )
