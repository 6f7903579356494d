"""``flatpeak probe``: figures of this machine, or of nodes of a cluster, in the form of a cluster file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from api.cli.console import DatabaseOption, JsonFlag, emit_json, err, out, table
from api.cli.executors import ExecutorOption, RayAddressOption
from api.cli.export import write_whole
from api.cli.probe_output import figure_rows, measured_json, print_measured, print_topology
from api.errors import RuleError

if TYPE_CHECKING:
    from cost_model.cluster_spec import ClusterSpec
    from cost_model.topology import Topology
    from tuner.probing.cluster import ProbeResult

TopologyFile = Annotated[
    Path | None, typer.Option("--nvidia-smi-topo", metavar="FILE", help="Output of `nvidia-smi topo -m`.")
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("probe")(probe)


def probe(
    *,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", min=1, max=4096, help="Ranks that measure together; default: every card, or 1."
        ),
    ] = None,
    nodes: Annotated[
        int, typer.Option("--nodes", min=1, max=4096, help="Nodes that the ranks stand on (--executor ray).")
    ] = 1,
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option("--device", help="Default: cuda where there is one.")
    ] = None,
    executor: ExecutorOption = "local",
    ray_address: RayAddressOption = None,
    time_limit: Annotated[
        float,
        typer.Option(
            "--time-limit", min=1, max=86_400, help="Seconds after which no further size is measured."
        ),
    ] = 300.0,
    nvidia_smi_topo: TopologyFile = None,
    nccl_topo: Annotated[
        Path | None, typer.Option("--nccl-topo", metavar="FILE", help="A dump by NCCL_TOPO_DUMP_FILE.")
    ] = None,
    slurm_topology: Annotated[
        Path | None, typer.Option("--slurm-topology", metavar="FILE", help="Slurm's topology.conf.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", metavar="FILE", help="Measure nothing: put the topology files into this cluster."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="cluster.yaml or cluster.json")
    ] = None,
    save: Annotated[bool, typer.Option("--save", help="Also keep it in the database.")] = False,
    database: DatabaseOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure this machine or a cluster: memory, matrix rate, host link, transfers by tier and size; read topologies.

    Example:

      flatpeak probe --ranks 4 -o cluster.yaml

    All ranks measure at once, as a training step loads the machine. Each figure is marked measured or assumed;
    of several nodes the slowest counts. Topology files alone are only read, unless --ranks is given.
    """
    from api.services.store import open_database
    from cost_model.cluster_file import cluster_to_mapping
    from cost_model.topology_import import read_topology, with_topology
    from db.repositories import ClusterRepository

    given = (nvidia_smi_topo, nccl_topo, slurm_topology)
    known = None
    if any(given):
        known = read_topology(nvidia_smi=nvidia_smi_topo, nccl=nccl_topo, slurm=slurm_topology)
    if cluster is not None and (known is None or ranks is not None or executor != "local"):
        raise RuleError(
            rule="--cluster takes the topology files into a cluster that is known, without measuring",
            value=cluster,
            remedy="Give it with topology files, and without --ranks and --executor.",
        )
    _check(nodes, executor, output)
    store = open_database(database) if save else None
    probed: ProbeResult | None = None
    found: ClusterSpec | None
    if known is not None and (cluster is not None or (ranks is None and executor == "local")):
        found = None if cluster is None else _known(cluster)
        if found is None and (output is not None or save):
            raise RuleError(
                rule="topology files alone make no cluster",
                value=str(output or "--save"),
                remedy="Add --cluster FILE (a preset, or what a probe wrote), or --ranks to measure.",
            )
    else:
        probed = _measure(
            ranks=ranks,
            nodes=nodes,
            device=device,
            executor=executor,
            ray_address=ray_address,
            limit_s=time_limit,
            topology=known,
            quiet=as_json,
        )
        found = probed.cluster
    if found is not None and known is not None:
        found = with_topology(found, known)
    mapping = None if found is None else cluster_to_mapping(found)
    if output is not None and mapping is not None:
        write_whole(output, _text(output, mapping))
    if store is not None and found is not None and mapping is not None:
        with store.session() as session:
            ClusterRepository(session).put(found.name, mapping, hardware_id=found.hardware_id)
        store.close()
    if as_json:
        emit_json(_json(found, mapping, output, known, probed))
        return
    if found is not None and mapping is not None:
        columns = ("figure", "value", "source")
        out.print(table(f"{found.name}  {found.hardware_id}", columns, figure_rows(mapping), numeric=(1,)))
    if probed is not None:
        print_measured(probed)
    topology = known if found is None else found.topology
    if topology is not None:
        print_topology(topology)
    if output is not None:
        out.print(f"Wrote {output}", markup=False)


def _check(nodes: int, executor: str, output: Path | None) -> None:
    """Refuse what can be known wrong before anything is measured."""
    if nodes > 1 and executor == "local":
        raise RuleError(
            rule="--nodes above 1 needs a cluster: this machine is one node",
            value=nodes,
            remedy="Add --executor ray (and --ray-address), or leave --nodes out.",
        )
    if output is None or (output.exists() and not output.is_file()):  # a pipe or a device has no suffix
        return
    if output.suffix not in (".yaml", ".yml", ".json"):
        raise RuleError(
            rule="--output is a YAML or JSON file, by its suffix",
            value=str(output),
            remedy="End its name in .yaml or .json.",
        )


def _known(name: str) -> ClusterSpec:
    from api.services.specs import cluster_from_text

    return cluster_from_text(name, None)


def _measure(
    *,
    ranks: int | None,
    nodes: int,
    device: str | None,
    executor: str,
    ray_address: str | None,
    limit_s: float,
    topology: Topology | None,
    quiet: bool,
) -> ProbeResult:
    from tuner.executors.choice import make_executor
    from tuner.probing.probe import probe_machine

    def tell(what: str) -> None:
        if not quiet:
            err.print(f"  {what}", markup=False)

    runner = make_executor(executor, ray_address)
    try:
        return probe_machine(
            ranks=ranks,
            nodes=nodes,
            device=device,
            executor=runner,
            fabric=None if topology is None else topology.fabric,
            limit_s=limit_s,
            progress=tell,
        )
    finally:
        runner.close()


def _json(
    found: ClusterSpec | None,
    mapping: dict[str, Any] | None,
    output: Path | None,
    known: Topology | None,
    probed: ProbeResult | None,
) -> dict[str, Any]:
    from cost_model.topology_file import topology_to_mapping

    topology = known if found is None else found.topology
    return {
        "hardware_id": None if found is None else found.hardware_id,
        "file": str(output) if output else None,
        "cluster": mapping,
        "topology": None if topology is None else topology_to_mapping(topology),
        "measured": None if probed is None else measured_json(probed),
    }


def _text(path: Path, mapping: dict[str, Any]) -> str:
    if path.suffix == ".json":
        return json.dumps(mapping, indent=2) + "\n"
    import yaml

    return str(yaml.safe_dump(mapping, sort_keys=False))
