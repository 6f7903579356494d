"""``flatpeak probe``: this machine's figures in the form of a cluster file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from api.cli.console import DatabaseOption, JsonFlag, emit_json, err, out, table
from api.cli.export import write_whole
from api.units import bytes_text, seconds_text


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("probe")(probe)


def probe(
    *,
    ranks: Annotated[int, typer.Option("--ranks", min=1, max=4096, help="Ranks that measure together.")] = 1,
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option("--device", help="Default: cuda where there is one.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="cluster.yaml or cluster.json")
    ] = None,
    save: Annotated[bool, typer.Option("--save", help="Also keep it in the database.")] = False,
    database: DatabaseOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure this machine: memory, matrix rate, host link, all-to-all and ring by size.

    Example:

      flatpeak probe --ranks 4 -o cluster.yaml

    All ranks measure at once, as a training step loads the machine. Each figure is marked measured or assumed.
    """
    from api.services.store import open_database
    from cost_model.cluster_file import cluster_to_mapping
    from db.repositories import ClusterRepository
    from tuner.probe import probe_machine

    def tell(what: str) -> None:
        if not as_json:
            err.print(f"  {what}", markup=False)

    store = open_database(database) if save else None
    measured = probe_machine(ranks=ranks, device=device, progress=tell)
    cluster = measured.cluster
    mapping = cluster_to_mapping(cluster)
    if output is not None:
        write_whole(output, _text(output, mapping))
    if store is not None:
        with store.session() as session:
            ClusterRepository(session).put(cluster.name, mapping, hardware_id=cluster.hardware_id)
        store.close()
    if as_json:
        emit_json(
            {"hardware_id": cluster.hardware_id, "file": str(output) if output else None, "cluster": mapping}
        )
        return
    out.print(
        table(
            f"{cluster.name}  {cluster.hardware_id}",
            ("figure", "value", "source"),
            _rows(mapping),
            numeric=(1,),
        )
    )
    if output is not None:
        out.print(f"Wrote {output}", markup=False)


def _text(path: Path, mapping: dict[str, Any]) -> str:
    if path.suffix == ".json":
        return json.dumps(mapping, indent=2) + "\n"
    import yaml

    return str(yaml.safe_dump(mapping, sort_keys=False))


def _rows(mapping: dict[str, Any], prefix: str = "") -> list[tuple[str, str, str]]:
    rows: list[tuple[str, str, str]] = []
    for key, value in mapping.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and set(value) == {"value", "source"}:
            rows.append((name, _figure(key, float(value["value"])), str(value["source"])))
        elif isinstance(value, dict):
            rows.extend(_rows(value, f"{name}."))
        elif isinstance(value, list):
            for place, item in enumerate(value):
                rows.extend(
                    _rows(item, f"{name}[{place}].") if isinstance(item, dict) else [(name, str(item), "")]
                )
        elif value not in (None, ""):
            rows.append((name, str(value), ""))
    return rows


def _figure(key: str, value: float) -> str:
    if key.endswith("bytes_per_s"):
        return f"{bytes_text(value)}/s"
    if key.endswith("_bytes"):
        return bytes_text(value)
    if key.endswith("_flops"):
        return f"{value / 1e9:,.1f} GFLOP/s"
    if key.endswith("_per_s"):
        return f"{value:,.0f}/s"
    return seconds_text(value) if key.endswith("_s") else f"{value:g}"
