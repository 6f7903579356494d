"""Two GPUs of one host over NCCL, in one command and under seven minutes.

    NCCL_NVLS_ENABLE=0 python -m benchmarks.two_gpus --out DIR
    python -m benchmarks.two_gpus --tiny --out DIR        # two CPU ranks over gloo, a minute

Parts, each on its own: what fails is reported and the rest goes on. ``DIR/report.json`` is written after every
part and ``DIR/samples.csv`` after every sweep, so a run that is cut short keeps what it had.

memory    bytes outside torch's allocator after the group's first all-reduce, all-to-all, ring hop
host      host memory written once (virtual machines are given memory as they use it)
links     all-to-all, ring hop, all-gather, all-reduce by size up to 1 GiB
hostlink  host link by copy size, one and two GPUs active
checks    the four operators over the group against a dense reference in one process
probe     ``flatpeak probe``
sweeps    every file of examples/sweeps/h200-x2, through a database, as ``flatpeak sweep`` runs them
overlap   a matmul, a transfer, both: which share of the shorter one is hidden
modes     30 and more repeats at K = 8, 10, 16 with host syncs, allocations and queueing time of each
errors    what one GPU's fit and a link model had predicted for the sweeps' rows; then the refit

``--only memory,links`` runs these parts alone; ``--minutes`` is the budget that sweeps and modes keep to.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.rank_gang import RankGang, usable_cores

if TYPE_CHECKING:  # every rank imports this file: what only its parent needs is imported where it is used
    import pandas as pd

    from tuner.sweeping.sweep_spec import SweepSpec

SWEEPS = Path(__file__).parent.parent / "examples" / "sweeps" / "h200-x2"
# Cheap and wanted most comes first: a run out of time leaves out the last.
ORDER: tuple[str, ...] = ("dispatch", "head", "optimizer", "boundaries", "head-short", "dispatch-skew")
ORDER += ("optimizer-engines", "boundaries-wide", "dispatch-long")
MIB = 2**20
Json = dict[str, Any]


class Run:
    """The parts of one run, what they found, and how much time is left."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.tiny: bool = options.tiny
        self.minutes: float = options.minutes
        self.device = "cpu" if self.tiny else "cuda"
        self.out: Path = options.out
        self.began = perf_counter()
        self.report: Json = {"parts": {}, "failed": {}, "seconds": {}}
        self.frames: list[pd.DataFrame] = []
        self.gang = RankGang(2, self.device)

    def left(self) -> float:
        """Seconds of the budget that are not spent."""
        return 60.0 * self.minutes - (perf_counter() - self.began)

    def part(self, name: str, work: Callable[[], Any]) -> None:
        """Run one part; its failure is part of the report."""
        if self.options.only and name.split(":", maxsplit=1)[0] not in self.options.only.split(","):
            return
        began = perf_counter()
        print(f"[{perf_counter() - self.began:6.1f} s] {name}", flush=True)
        try:
            self.report["parts"][name] = work()
        except Exception as error:  # the other parts are worth having all the same
            self.report["failed"][name] = traceback.format_exc()[-4000:]
            print(f"  FAILED {name}: {type(error).__name__}: {str(error)[-1500:]}", flush=True)
        self.report["seconds"][name] = round(perf_counter() - began, 2)
        self.save()

    def save(self) -> None:
        text = json.dumps(self.report, indent=1, default=str) + "\n"
        (self.out / "report.json").write_text(text, encoding="utf-8")

    def ranks(self, function: str, payload: Json, timeout_s: float = 90.0) -> list[Any]:
        """A function of benchmarks.two_gpus_parts on both ranks."""
        payload = {"device": self.device, **payload}
        return self.gang.run(f"benchmarks.two_gpus_parts:{function}", payload, timeout_s)


def library_memory(run: Run) -> list[Json]:
    with RankGang(2, run.device, join=False) as gang:
        found = gang.run("benchmarks.two_gpus_parts:library_memory", {"device": run.device}, 120.0)
    for name, nbytes in found[0].items():
        print(f"  {name:<20}{nbytes / 2**30:8.3f} GiB")
    return found


def links(run: Run) -> Json:
    sizes = [2**12, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28, 2**30]
    payload = {"sizes": sizes[:4] if run.tiny else sizes, "repeats": 5}
    both = run.ranks("link_curves", payload)
    slowest = {
        name: [[a[0], max(a[1], b[1]), max(a[2], b[2])] for a, b in zip(rows, both[1][name], strict=True)]
        for name, rows in both[0].items()
    }
    for name, rows in slowest.items():
        share = 0.5 if name == "all_to_all" else 1.0
        text = "  ".join(f"{int(n) >> 10}K {1e6 * s:.0f}us {share * n / s / 1e9:.0f}GB/s" for n, s, _ in rows)
        print(f"  {name:<11}{text}")
    return slowest


def host_links(run: Run) -> list[Json]:
    sizes = [MIB, 16 * MIB] if run.tiny else [MIB, 16 * MIB, 120_000_000, 1024 * MIB]
    payload = {
        "sizes": sizes,
        "slab_bytes": (64 if run.tiny else 2048) * MIB,
        "seconds": 0.02 if run.tiny else 0.25,
    }
    rows = [row for rank in run.ranks("host_links", payload) for row in rank]
    for active in (1, 2):
        for direction in ("in", "out", "both"):
            found = [r for r in rows if (r["active"], r["direction"]) == (active, direction)]
            text = "  ".join(f"{r['copy_bytes'] >> 20}MiB {r['bytes_per_s'] / 1e9:.1f}" for r in found)
            print(f"  {active} active, {direction:<5}GB/s: {text}")
    return rows


def check_cases(operator: str) -> list[Json]:
    """Configurations that the four operators are checked in, in both dtypes."""
    cases: list[Json] = []
    for dtype in ("float32", "bfloat16"):
        if operator == "pipelined_llep":
            shape = {"tokens_per_rank": 64, "hidden": 64, "intermediate": 32, "experts": 32, "top_k": 8}
            for profile in ("balanced", "skew:80/16", "random", "one_hot"):
                for chunks, schedule in ((1, "serial"), (4, "prefetch"), (10, "overlap")):
                    config = {"chunks": chunks, "dispatch_schedule": schedule}
                    cases.append({"shape": shape | {"dtype": dtype, "profile": profile}, "config": config})
        elif operator == "ring_dtp":
            head = {"tokens_per_rank": 256, "hidden": 64, "vocab": 1000, "dtype": dtype}
            for mode in ("activations", "weights", "gather"):
                cases += [
                    {"shape": head, "config": {"ring_mode": mode, "strip_rows": r}} for r in (64, 100, 256)
                ]
        elif operator == "checkpoint_offload":
            stack = {"tokens_per_rank": 256, "hidden": 64, "boundaries": 7, "dtype": dtype}
            one = 256 * 64 * (4 if dtype == "float32" else 2)
            cases += [{"shape": stack, "config": {"host_budget_bytes": n * one}} for n in (0, 3, 6)]
        else:
            for engine in ("stream", "host", "split", "device"):
                step: Json = {"engine": engine, "bucket_params": 100_000, "staging_slots": 3}
                step |= {"host_share": 0.5} if engine == "split" else {}
                cases.append({"shape": {"params": 1_000_000, "dtype": dtype}, "config": step})
    return cases


def checks(run: Run, operator: str) -> list[Json]:
    both = run.ranks("checks", {"operator": operator, "cases": check_cases(operator)}, 150.0)
    rows = [max(pair, key=lambda row: row["error"]) for pair in zip(*both, strict=True)]
    for dtype in ("float32", "bfloat16"):
        own = [row for row in rows if row["shape"]["dtype"] == dtype]
        print(f"  {operator:<20}{dtype:<10}{len(own)} cases, worst {max(r['error'] for r in own):.2e}")
    for row in rows:
        if not row["good"]:
            print(
                f"  WRONG {operator} {row['config']} {row['shape']}: {row['error']:.3e} > {row['tolerance']:g}"
            )
    return rows


def probe(run: Run) -> Json:
    from cost_model.cluster_file import cluster_to_mapping
    from tuner.probing.probe import probe_machine

    found = probe_machine(ranks=2, device=run.device)
    mapping = cluster_to_mapping(found.cluster)
    print(f"  {found.cluster.hardware_id}")
    return {
        "hardware_id": found.cluster.hardware_id,
        "cluster": mapping,
        "transfers": found.transfers,
    }


@contextmanager
def store() -> Iterator[Any]:
    """A database of this run."""
    from db.session import Database

    with tempfile.TemporaryDirectory(prefix="flatpeak-two-gpus-") as folder:
        database = Database(f"sqlite:///{folder}/sweeps.db")
        database.migrate()
        yield database


def sweep_specs(run: Run) -> dict[str, SweepSpec]:
    """The files, in their order; with ``--tiny`` as small problems on the CPU."""
    from tuner.sweeping.sweep_spec import read_sweep_file

    specs = {name: read_sweep_file(SWEEPS / f"{name}.yaml") for name in ORDER}
    return {name: _tiny(spec) for name, spec in specs.items()} if run.tiny else specs


def _tiny(spec: SweepSpec) -> SweepSpec:
    """The same operator and knobs at a size for two CPU ranks."""
    shape = dict(spec.shape) | {"dtype": "float32"}
    small = {"tokens_per_rank": 128, "hidden": 32, "intermediate": 16, "vocab": 512, "params": 20_000}
    shape |= {key: value for key, value in small.items() if key in shape}
    space = {key: list(values) for key, values in spec.space.items()}
    if "host_budget_bytes" in space:
        space["host_budget_bytes"] = [0, 4 * 128 * 32 * (shape["boundaries"] - 1)]
    if "strip_rows" in space:
        space["strip_rows"] = [32, 128]
    if "chunks" in space:
        space["chunks"] = [1, 4]
    if "bucket_params" in space:
        space["bucket_params"] = [2048]
    target = spec.target.model_copy(update={"device": "cpu"})
    return spec.model_copy(update={"shape": shape, "space": space, "target": target, "repeats": 3})


def sweeps(run: Run) -> None:
    """Every file as a part of its own, on one warm gang of the tuner's."""
    from tuner.executors.local import LocalExecutor

    with store() as database, closing(LocalExecutor()) as executor:
        for name, spec in sweep_specs(run).items():
            run.part(f"sweeps:{name}", lambda n=name, s=spec: _sweep(run, database, executor, s, n))  # type: ignore[misc]


def _sweep(run: Run, database: Any, executor: Any, spec: SweepSpec, name: str) -> list[Json]:
    import pandas as pd

    from db.repositories import SampleRepository, TrialRepository
    from tuner.sweeping.sweep import create_sweep, run_sweep

    reserve = 0.0 if run.tiny else 60.0  # for overlap and modes
    sweep_id = create_sweep(database, spec)
    outcome = run_sweep(database, sweep_id, executor, stop=lambda: run.left() < reserve)
    with database.reading() as session:
        trials = TrialRepository(session).of_sweep(sweep_id)
        frame = SampleRepository(session).frame(sweep_id=sweep_id)
    run.frames.append(frame.assign(source=name))
    pd.concat(run.frames).to_csv(run.out / "samples.csv", index=False)
    rows: list[Json] = []
    for trial in trials:
        row: Json = {"config": trial.config_json, "state": trial.state, "reason": trial.reason}
        row |= {"bound_bytes": trial.bound_bytes, "result": trial.result_json}
        rows.append(row)
        result = trial.result_json or {}
        passes = "  ".join(f"{k} {1e3 * v:.2f}" for k, v in result.get("passes", {}).items())
        peak = result.get("peak_allocated_bytes") or 0
        why = "" if trial.reason is None else str(trial.reason).strip().splitlines()[-1][:200]
        slow = f" slow {result['slow_share']:.2f}" if result.get("slow_share") else ""
        print(
            f"  {trial.config_json} {trial.state} {passes} ms  {peak / 2**30:.2f} of "
            f"{(trial.bound_bytes or 0) / 2**30:.2f} GiB{slow} {why}",
            flush=True,
        )
    if outcome.state.value not in ("succeeded", "done", "completed"):
        print(f"  sweep {outcome.state.value}: {outcome.reason} {outcome.counts}")
    return rows


def overlap(run: Run) -> list[Json]:
    full: Json = {
        "matrix": 8192,
        "matmuls": 20,
        "sweep_bytes": 1024 * MIB,
        "sweeps": 40,
        "transfer_bytes": 256 * MIB,
        "counts": [8, 32, 64],
        "host_counts": [1, 3, 8],
        "repeats": 5,
    }
    small: Json = {"matrix": 128, "matmuls": 2, "sweep_bytes": MIB, "sweeps": 2, "transfer_bytes": MIB}
    small |= {"counts": [1], "host_counts": [1], "repeats": 2}
    both = run.ranks("overlap", small if run.tiny else full)
    rows = [min(pair, key=lambda row: row["hidden"]) for pair in zip(*both, strict=True)]
    for row in rows:
        print(
            f"  {row['compute']:<8}{1e3 * row['compute_s']:7.2f} ms, {row['transfer']:<11}"
            f"{1e3 * row['transfer_s']:7.2f} ms, together {1e3 * row['together_s']:7.2f} ms: "
            f"hidden {row['hidden']:.2f}"
        )
    return rows


def modes(run: Run, tokens: int, chunks: int, schedule: str) -> Json:
    """Repeats of one launch; the slower rank of each."""
    if run.left() < 8.0:
        raise TimeoutError("no time left")
    shape: Json = {"tokens_per_rank": tokens, "hidden": 7168, "intermediate": 2048, "experts": 32, "top_k": 8}
    shape |= {"dtype": "bfloat16", "profile": "balanced"}
    if run.tiny:
        shape |= {"tokens_per_rank": 64, "hidden": 32, "intermediate": 16, "dtype": "float32"}
    config = {"chunks": chunks, "dispatch_schedule": schedule}
    repeats = 2 if run.tiny else 32
    payload = {"operator": "pipelined_llep", "shape": shape, "config": config, "repeats": repeats}
    both = run.ranks("modes", payload, 90.0)
    rows = [
        max(pair, key=lambda row: row["seconds"])
        for pair in zip(both[0]["rows"], both[1]["rows"], strict=True)
    ]
    for kind in dict.fromkeys((row["how"], row["pass"]) for row in rows):
        own = sorted(row["seconds"] for row in rows if (row["how"], row["pass"]) == kind)
        host = sorted(row["host_s"] for row in rows if (row["how"], row["pass"]) == kind)
        middle = own[len(own) // 2]
        slow = sum(s > 1.1 * own[0] for s in own) / len(own)
        print(
            f"  {kind[1]:<17}{1e3 * own[0]:8.2f} .. {1e3 * middle:8.2f} .. {1e3 * own[-1]:8.2f} ms, slow {slow:.2f}, "
            f"host {1e3 * host[len(host) // 2]:.2f} ms"
        )
    print(f"  host syncs a pass: {both[0]['syncs']}")
    return {
        "shape": shape,
        "config": config,
        "syncs": [one["syncs"] for one in both],
        "rows": [one["rows"] for one in both],
    }


def errors(run: Run) -> Json:
    import pandas as pd

    from benchmarks import two_gpus_errors

    samples = pd.concat(run.frames, ignore_index=True)
    found = two_gpus_errors.evaluate(samples)
    print("\n".join(f"  {line}" for line in two_gpus_errors.table(found)))
    return found


def environment(run: Run) -> Json:
    from tuner.machine.fingerprint import local_hardware, local_hardware_id, local_software

    found: Json = {
        "hardware_id": local_hardware_id(run.device),
        "hardware": local_hardware(run.device),
        "software": local_software(),
        "usable_cores": usable_cores(),
        "cpu_count": os.cpu_count(),
        "options": {key: str(value) for key, value in vars(run.options).items()},
    }
    print(f"  {found['hardware_id']}, {found['usable_cores']} of {found['cpu_count']} cores")
    return found


def main(argv: list[str] | None = None) -> int:
    """Exit 1 when a part failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for report.json and samples.csv")
    parser.add_argument("--tiny", action="store_true", help="two CPU ranks, small shapes")
    parser.add_argument("--only", default="", help="parts, separated by commas")
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument(
        "--host-gib", type=float, default=24.0, help="host memory a rank writes once beforehand"
    )
    parser.add_argument("--commit", help="the source revision, where there is no repository to ask")
    options = parser.parse_args(argv)
    if options.commit:
        os.environ["FLATPEAK_COMMIT"] = options.commit
    if not options.tiny and torch.cuda.device_count() < 2:
        parser.error(f"two GPUs are needed and {torch.cuda.device_count()} are here; --tiny runs on the CPU")
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run(options)
    run.part("memory", lambda: library_memory(run))
    if not run.tiny:
        nbytes = int(options.host_gib * 2**30)
        run.part("host", lambda: run.ranks("grow_host_memory", {"bytes": nbytes}, 120.0))
    run.part("links", lambda: links(run))
    run.part("hostlink", lambda: host_links(run))
    for operator in ("pipelined_llep", "ring_dtp", "checkpoint_offload", "stream_adamw"):
        run.part(f"checks:{operator}", lambda o=operator: checks(run, o))  # type: ignore[misc]
    run.part("overlap", lambda: overlap(run))
    run.part("environment", lambda: environment(run))
    for chunks in (8, 10, 16):
        run.part(f"modes:16384:{chunks}:serial", lambda k=chunks: modes(run, 16_384, k, "serial"))  # type: ignore[misc]
    run.gang.close()
    run.part("probe", lambda: probe(run))
    if not options.only or "sweeps" in options.only.split(","):
        try:
            sweeps(run)
        except Exception:  # a database or an executor that cannot even be made
            run.report["failed"]["sweeps"] = traceback.format_exc()
            print(run.report["failed"]["sweeps"])
    if run.frames:
        run.part("errors", lambda: errors(run))
    for tokens, chunks, schedule in (
        (16_384, 10, "overlap"),
        (16_384, 16, "overlap"),
        (65_536, 10, "overlap"),
    ):
        run.part(
            f"modes:{tokens}:{chunks}:{schedule}",
            lambda t=tokens, k=chunks, s=schedule: modes(run, t, k, s),  # type: ignore[misc]
        )
    run.gang.close()
    run.save()
    took = perf_counter() - run.began
    print(f"{took:.0f} s; failed: {sorted(run.report['failed']) or 'nothing'}")
    return 1 if run.report["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
