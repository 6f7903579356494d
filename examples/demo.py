"""The main job on real input, as a user would type it: ``make demo``.

Probes this machine, sweeps the four operators on four gloo ranks, fits the cost model, plans gpt-oss-20b for an
HGX-H200 node and for this machine, plans a small MoE for this machine with what the sweeps measured, exports it
and runs a job from the export. Everything lands in ``demo-run/``. Killed in the middle, the same command goes on:
no finished trial is run again.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RUN = Path("demo-run")
DATABASE = f"sqlite:///{RUN / 'flatpeak.db'}"
RANKS = 4
SWEEPS = ("dispatch", "head", "boundaries", "optimizer")
FEWEST_TRIALS = 48
PORT = 8642
# The layout the sweeps measured; without it the planner may prefer one that nobody ran here.
MEASURED_LAYOUT = tuple(
    word
    for pin in ("sequence_degree=4", "expert_degree=4", "vocab_degree=4", "optimizer_engine=stream")
    for word in ("--fix", pin)
)


def main() -> int:
    """Run every step; 0 when the whole path worked."""
    RUN.mkdir(exist_ok=True)
    cluster, launch = RUN / "cluster.yaml", RUN / "launch.json"

    title("1. What is this machine?")
    if cluster.exists():
        print(f"already measured: {cluster}")
    else:
        flatpeak("probe", "--ranks", RANKS, "--device", "cpu", "--output", cluster)

    title(f"2. Run the real operators on {RANKS} ranks")
    for name in SWEEPS:
        flatpeak("sweep", HERE / "sweeps" / f"{name}.yaml", "--resume", "--database", DATABASE)
    trials = finished_trials()
    print(f"\n{trials} trials finished")
    if trials < FEWEST_TRIALS:
        print(f"at least {FEWEST_TRIALS} were to finish: see `flatpeak sweep list --database {DATABASE}`")
        return 1

    title("3. Fit the latency model to them")
    flatpeak("fit", "--cluster", cluster, "--output", RUN / "cost-model.json", "--database", DATABASE)

    title("4. gpt-oss-20b at 131,072 tokens on one HGX-H200 node")
    big = (
        "--model",
        HERE / "models" / "gpt-oss-20b.json",
        "--context",
        131072,
        "--global-batch-tokens",
        524288,
    )
    flatpeak("plan", *big, "--cluster", "hgx-h200", "--nodes", 1)

    title("5. The same on this machine: it does not fit; what would?")
    flatpeak("plan", *big, "--cluster", cluster, expect=1)

    title("6. A small MoE on this machine, with what the sweeps measured")
    small = ("--model", HERE / "models" / "small-moe.json", "--context", 4096, "--global-batch-tokens", 8192)
    here = ("--cluster", cluster, "--activation-bytes", 4, "--database", DATABASE, *MEASURED_LAYOUT)
    flatpeak("plan", *small, *here)
    plan = json.loads(flatpeak("plan", *small, *here, "--save", "--json", show=False))
    (RUN / "plan.json").write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")

    title("7. Export it, and run a job from the export")
    flatpeak("export", RUN / "plan.json", "--format", "launch", "--output", launch)
    run(sys.executable, "-m", "examples.job", launch)

    title("Done")
    print(f"plans, sweeps and the fit are in {DATABASE}; to see them:")
    print(f"  {VENV_FLATPEAK} serve --port {PORT} --database {DATABASE}    then http://127.0.0.1:{PORT}/")
    return 0


VENV_FLATPEAK = str(Path(sys.executable).parent / "flatpeak")


def flatpeak(*words: object, expect: int = 0, show: bool = True) -> str:
    """Run the command line, echoing what a user would type."""
    return run(VENV_FLATPEAK, *words, expect=expect, show=show)


def run(*words: object, expect: int = 0, show: bool = True) -> str:
    """Run a command; its output is shown, or returned when it is not.

    Raises:
        SystemExit: it ended with another code than ``expect``.
    """
    command = [str(word) for word in words]
    typed = shlex.join([Path(command[0]).name, *command[1:]])
    print(f"\n$ {typed}", flush=True)
    environment = os.environ | {"COLUMNS": os.environ.get("COLUMNS", "110")}
    done = subprocess.run(
        command, stdout=None if show else subprocess.PIPE, text=True, check=False, env=environment
    )
    if done.returncode != expect:
        sys.exit(f"`{typed}` ended with {done.returncode}, {expect} was expected")
    return done.stdout or ""


def finished_trials() -> int:
    """Trials of all sweeps that succeeded."""
    answer: Any = json.loads(flatpeak("sweep", "list", "--database", DATABASE, "--json", show=False))
    return sum(sweep["trials"].get("succeeded", 0) for sweep in answer["items"])


def title(text: str) -> None:
    """A heading between steps."""
    print(f"\n{'=' * 4} {text} {'=' * max(4, 100 - len(text))}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
