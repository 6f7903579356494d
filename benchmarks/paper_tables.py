"""The paper's component tables on one node of eight GPUs: predicted, measured and printed figures side by side.

    NCCL_NVLS_ENABLE=0 python -m benchmarks.paper_tables --out DIR      # eight GPUs, under ten minutes
    python -m benchmarks.paper_tables --loopback --out DIR              # one GPU as rank 0 of eight
    python -m benchmarks.paper_tables --tiny --out DIR                  # two CPU ranks, small shapes

Dispatch (65,536 tokens a rank, H = 7168, I = 2048, 128 experts, top-8; balanced and three skews) with standard
expert parallelism and LLEP beside it; the head (P = 8, V = 200,000); boundaries and optimizer of gpt-oss-20b on
eight ranks. With ``--loopback`` one process runs rank 0's true schedule at group size eight: memory and compute are
true, link time is absent and one GPU has the host to itself.

What is predicted was committed before any such run (benchmarks/predictions, ``benchmarks.paper_cases``). A case
whose bound exceeds the card is not launched, and one that fails is reported while the rest go on.
``DIR/paper_tables.json`` is written after every case, ``DIR/samples.csv`` and ``DIR/paper_tables.md`` at the end.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.rank_gang import PartFailed, RankGang
from benchmarks.two_gpus_parts import timed
from tuner.measuring.modes import split_modes
from tuner.registry import load_adapter

if TYPE_CHECKING:
    from benchmarks.paper_cases import Case
    from operators.ranks import Ranks

GIB = 2**30
Json = dict[str, Any]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _gib(gib: float) -> str:
    return f"{gib:.2f} GiB" if gib >= 0.01 or gib == 0 else f"{1024 * gib:.2f} MiB"


def _ratio(ratio: float) -> str:
    return f"{ratio:.3f}"


FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "forward_s": ("forward", _ms),
    "backward_s": ("backward", _ms),
    "step_s": ("step", _ms),
    "forward_gib": ("forward peak", _gib),
    "peak_gib": ("peak", _gib),
    "fall_gib": ("fall of the peak", _gib),
    "staging_gib": ("staging", _gib),
    "over_materialised": ("time over the materialised head", _ratio),
}
"""Figure of a case: its title, and how it is written."""


def run_case(ranks: Ranks, payload: Json) -> Json:
    """One case on one rank: seconds of every pass, peak of forward and of everything. A collective."""
    device_name = payload["device"]
    device = (
        torch.device("cuda", torch.cuda.current_device()) if device_name == "cuda" else torch.device("cpu")
    )
    adapter = load_adapter(payload["operator"])
    shape = adapter.shape(payload["shape"], ranks.size)
    config = adapter.canonical(shape, payload["config"], ranks.size)
    runnable = adapter.build(shape, config, ranks, device_name, payload["provider"])
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated() if cuda else 0
    for _ in range(payload["warmups"]):
        runnable.forward_backward()
    seconds: dict[str, list[float]] = {name: [] for name in runnable.passes}
    peaks = dict.fromkeys(runnable.passes, 0)
    reserved = 0
    for _ in range(payload["repeats"]):
        runnable.reset()
        for name, run in runnable.passes.items():
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            seconds[name].append(timed(ranks, device, run))
            if cuda:
                peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated())
                reserved = max(reserved, torch.cuda.max_memory_reserved())
    locked = runnable.host_locked_bytes
    del runnable
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return {
        "seconds": seconds,
        "peaks": peaks,
        "reserved": reserved,
        "base": base,
        "host_locked": locked,
    }


def figures(answers: list[Json], case: Case) -> Json:
    """A case's measured figures: the slowest rank of each repeat, its fast mode; the largest peak of any rank."""
    found: Json = {}
    for name in answers[0]["seconds"]:
        slowest = [max(times) for times in zip(*(one["seconds"][name] for one in answers), strict=True)]
        modes = split_modes(slowest)
        found[f"{name}_s"] = modes.fast_s
        if modes.slow_share:
            found[f"{name}_slow"] = {"seconds": modes.slow_s, "share": modes.slow_share}
    peaks = {name: max(one["peaks"][name] for one in answers) for name in answers[0]["peaks"]}
    if any(peaks.values()):  # a CPU has no allocator to ask
        found["peak_gib"] = max(peaks.values()) / GIB
        if case.operator == "pipelined_llep":
            found["forward_gib"] = peaks["forward"] / GIB
        if case.operator == "stream_adamw":
            found["staging_gib"] = max(one["base"] for one in answers) / GIB - _weights_gib(case)
    found["reserved_gib"] = max(one["reserved"] for one in answers) / GIB
    found["host_locked_gib"] = max(one["host_locked"] for one in answers) / GIB
    return found


def _weights_gib(case: Case) -> float:
    scalar = 2 if case.shape["dtype"] == "bfloat16" else 4
    return float(2 * scalar * case.shape["params"] / GIB)


def compare(rows: Json) -> None:
    """Measured figures that stand for two runs: how far a peak falls, how much slower the shared head is."""
    for name, row in rows.items():
        mine = row.get("measured", {})
        words = name.split()
        if words[0] == "boundaries":
            kept = rows.get("boundaries 0 of 47", {}).get("measured", {})
            if words[1] != "0" and "peak_gib" in mine and "peak_gib" in kept:
                mine["fall_gib"] = kept["peak_gib"] - mine["peak_gib"]
        if words[0] == "head" and words[2] == "flatpeak":
            whole = rows.get(" ".join([words[0], words[1], "materialised", words[3]]), {}).get("measured", {})
            if "forward_s" in mine and "forward_s" in whole:
                total = mine["forward_s"] + mine["backward_s"]
                mine["over_materialised"] = total / (whole["forward_s"] + whole["backward_s"])


def table(rows: Json) -> Iterator[str]:
    """One line a figure that at least two of predicted, measured and printed have, or that was measured."""
    yield f"| {'case':<42} | {'figure':<32} | {'predicted':>12} | {'measured':>12} | {'paper':>10} |"
    yield f"|{'-' * 44}|{'-' * 34}|{'-' * 13}:|{'-' * 13}:|{'-' * 11}:|"
    for name, row in rows.items():
        columns = [row.get(key, {}) for key in ("predicted", "measured", "paper")]
        for key, (title, write) in FIGURES.items():
            cells = [write(column[key]) if key in column else "" for column in columns]
            if any(cells):
                yield f"| {name:<42} | {title:<32} | {cells[0]:>12} | {cells[1]:>12} | {cells[2]:>10} |"
        if "not_run" in row:
            yield f"| {name:<42} | not run: {str(row['not_run'])[:120]} | | | |"


def tiny(case: Case) -> Case:
    """The case at a size for two CPU ranks."""
    small = {"tokens_per_rank": 128, "hidden": 32, "intermediate": 16, "vocab": 512, "params": 20_000}
    small |= {"experts": 32, "boundaries": 5}
    shape = {key: small.get(key, value) for key, value in case.shape.items()}
    config = dict(case.config)
    if "host_budget_bytes" in config:
        config["host_budget_bytes"] = min(4, config["host_budget_bytes"] // 2**28) * 8192
    if "bucket_params" in config:
        config["bucket_params"] = 4096
    return replace(case, shape=shape, config=config, warmups=1, repeats=2)


class Runner:
    """Runs a case on a gang, or in this process as one rank of a group that is not there."""

    def __init__(self, options: argparse.Namespace, ranks: int, device: str) -> None:
        self.device, self.ranks = device, ranks
        self._loopback: Ranks | None = None
        self._gang: RankGang | None = None
        if options.loopback:
            from operators.ranks import LoopbackRanks

            self._loopback = LoopbackRanks(ranks, options.rank)
        else:
            self._gang = RankGang(ranks, device)

    def run(self, function: str, payload: Json, timeout_s: float) -> list[Any]:
        payload = {"device": self.device, **payload}
        if self._gang is not None:
            return self._gang.run(function, payload, timeout_s)
        try:
            return [run_case(self._loopback, payload)]  # type: ignore[arg-type]
        except Exception as error:
            gc.collect()
            torch.cuda.empty_cache()
            raise PartFailed(f"{type(error).__name__}: {str(error)[:300]}") from error

    def close(self) -> None:
        if self._gang is not None:
            self._gang.close()


def card_bytes() -> int | None:
    """Memory of the smallest card that is here; None without one."""
    cards = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    return min(cards, default=None)


def run_all(options: argparse.Namespace) -> Json:
    """Every case that there is time and memory for."""
    from benchmarks.paper_cases import RANKS, cases, frozen_model, predicted, predictions
    from tuner.machine.fingerprint import commit, local_hardware_id

    began = perf_counter()
    ranks = 2 if options.tiny else RANKS
    device = "cpu" if options.tiny else "cuda"
    cost = frozen_model()
    rows: Json = predictions(cost)["cases"] if not options.tiny else {}
    limit = None if options.tiny else card_bytes()
    found: Json = {"hardware_id": local_hardware_id(device), "commit": commit(), "loopback": options.loopback}
    found |= {"cost_model_id": cost.id, "ranks": ranks, "cases": rows}
    runner = Runner(options, ranks, device)
    if not options.tiny and not options.loopback:
        try:
            took = runner.run(
                "benchmarks.two_gpus_parts:grow_host_memory", {"bytes": int(options.host_gib * GIB)}, 150.0
            )
            print(f"host memory written in {max(map(float, took)):.0f} s", flush=True)
        except PartFailed as error:
            print(f"host memory could not be written: {error}", flush=True)
    try:
        for case in cases():
            if options.only and options.only not in case.id:
                rows.pop(case.id, None)
                continue
            if options.tiny:
                case = tiny(case)  # noqa: PLW2901
                rows[case.id] = {"predicted": predicted(case, cost, ranks), "paper": {}}
            row = rows[case.id]
            bound = GIB * row["predicted"]["peak_gib"]
            left = 60.0 * options.minutes - (perf_counter() - began)
            if limit is not None and bound > 0.95 * limit:
                row["not_run"] = (
                    f"its bound of {bound / GIB:.1f} GiB exceeds the card's {limit / GIB:.1f} GiB"
                )
            elif left < 15.0:
                row["not_run"] = "no time left"
            else:
                payload = {
                    "operator": case.operator,
                    "provider": case.provider,
                    "shape": case.shape,
                    "config": case.config,
                    "warmups": case.warmups,
                    "repeats": case.repeats,
                }
                try:
                    answers = runner.run("benchmarks.paper_tables:run_case", payload, min(left, 120.0))
                    row["measured"], row["ranks"] = figures(answers, case), answers
                except PartFailed as error:
                    row["not_run"] = str(error).strip().splitlines()[-1]
                    print(str(error)[-1500:], flush=True)
            said = row.get("not_run") or {
                key: round(value, 4) for key, value in row["measured"].items() if isinstance(value, float)
            }
            print(f"[{perf_counter() - began:6.1f} s] {case.id}: {said}", flush=True)
            compare(rows)
            (options.out / "paper_tables.json").write_text(
                json.dumps(found, indent=1) + "\n", encoding="utf-8"
            )
    finally:
        runner.close()
    found["seconds"] = round(perf_counter() - began, 1)
    return found


def write_samples(found: Json, path: Path) -> None:
    """One line a rank, pass and repeat."""
    from benchmarks.rows import COLUMNS

    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for row in found["cases"].values():
            for rank, one in enumerate(row.get("ranks", [])):
                for name, times in one["seconds"].items():
                    for repeat, seconds in enumerate(times):
                        writer.writerow(
                            {
                                "operator": row["operator"],
                                "provider": row["provider"],
                                "config_json": json.dumps(row["config"], sort_keys=True),
                                "shape_json": json.dumps(
                                    row["shape"] | {"ranks": found["ranks"], "loopback": found["loopback"]},
                                    sort_keys=True,
                                ),
                                "pass": name,
                                "rank": rank,
                                "repeat": repeat,
                                "seconds": f"{seconds:.6f}",
                                "allocated_bytes": one["peaks"][name],
                                "reserved_bytes": one["reserved"],
                                "peak_source": "cuda",
                                "hardware_id": found["hardware_id"],
                                "operator_version": load_adapter(row["operator"]).version,
                                "commit": found["commit"],
                            }
                        )


def main(argv: list[str] | None = None) -> int:
    """Exit 1 when a case that fits was not measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--loopback", action="store_true", help="one GPU as one rank of eight")
    parser.add_argument("--rank", type=int, default=0, help="which rank, with --loopback")
    parser.add_argument("--tiny", action="store_true", help="two CPU ranks, small shapes")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument(
        "--host-gib", type=float, default=36.0, help="host memory a rank writes once beforehand"
    )
    parser.add_argument("--commit", help="the source revision, where there is no repository to ask")
    options = parser.parse_args(argv)
    if options.commit:
        os.environ["FLATPEAK_COMMIT"] = options.commit
    here, needed = torch.cuda.device_count(), 1 if options.loopback else 8
    if not options.tiny and here < needed:
        parser.error(f"{needed} GPUs are needed and {here} are here; see --loopback and --tiny")
    options.out.mkdir(parents=True, exist_ok=True)
    found = run_all(options)
    lines = list(table(found["cases"]))
    (options.out / "paper_tables.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (options.out / "paper_tables.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if not options.tiny:
        write_samples(found, options.out / "samples.csv")
    print("\n".join(lines))
    missed = [
        name for name, row in found["cases"].items() if "not_run" in row and "bound" not in row["not_run"]
    ]
    print(
        f"{found['seconds']} s; {len(missed)} cases failed: {missed}" if missed else f"{found['seconds']} s"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
