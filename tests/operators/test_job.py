"""The example job: all operators from one launch.json, whatever its knobs say the same training step."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from examples.job import cut_to, main, train
from operators.launch import parse_launch
from operators.ranks import Ranks
from tests.gang import gang

_TOKENS = 40


def _body(**knobs: object) -> dict[str, Any]:
    launch = {
        "schema_version": 1,
        "sequence_degree": 1,
        "expert_degree": 2,
        "vocab_degree": 2,
        "max_tokens_per_rank": 48,
        "accumulation_steps": 2,
        "chunk_tokens": 48,
        "max_chunks": 1,
        "dispatch_schedule": "serial",
        "alpha": 1.0,
        "min_rows": 4,
        "lambda": 1.0,
        "ring_mode": "activations",
        "strip_rows": 48,
        "host_budget_bytes": 0,
        "optimizer_engine": "stream",
        "host_share": 0.0,
        "bucket_params": 2048,
        "staging_slots": 2,
        "placement": "contiguous",
    }
    model = {"name": "m", "hidden": 16, "layers": 1, "vocab": 50, "experts": 4, "top_k": 2}
    return {"schema_version": 1, "model": model | {"expert_intermediate": 24}, "launch": launch | knobs}


def _train(ranks: Ranks, body: dict[str, Any]) -> tuple[float, float]:
    return train(parse_launch(body), _TOKENS)


@pytest.mark.parametrize(
    "knobs",
    [
        {"chunk_tokens": 8, "max_chunks": 8, "dispatch_schedule": "overlap"},
        {"ring_mode": "weights", "strip_rows": 7, "host_budget_bytes": 1 << 20},
        {"ring_mode": "gather", "bucket_params": 500, "staging_slots": 3, "optimizer_engine": "device"},
    ],
)
def test_knobs_change_memory_and_time_not_the_step(knobs: dict[str, object]) -> None:
    plain, tuned = gang(2).run(_train, _body()), gang(2).run(_train, _body(**knobs))
    assert plain[0] == plain[1]
    assert plain[0][1] < plain[0][0]
    for one, other in zip(plain, tuned, strict=True):
        assert other == pytest.approx(one, rel=1e-5)


def test_replicated_experts_and_heads_take_one_step_together() -> None:
    before, after = gang(2).run(_train, _body(expert_degree=1, vocab_degree=1))[0]
    assert after < before


@pytest.mark.parametrize("degrees", [(4, 4, 4), (8, 2, 4), (1, 4, 1)])
def test_a_launch_planned_for_larger_groups_runs_on_the_ranks_there_are(
    degrees: tuple[int, int, int],
) -> None:
    names = ("sequence_degree", "expert_degree", "vocab_degree")
    cut = {name: min(degree, 2) for name, degree in zip(names, degrees, strict=True)}
    asked = gang(2).run(_train, _body(**dict(zip(names, degrees, strict=True))))
    assert asked == gang(2).run(_train, _body(**cut))


def test_degrees_are_cut_to_common_divisors_and_it_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    launch = parse_launch(_body(sequence_degree=8, expert_degree=4, vocab_degree=12))
    for ranks in (1, 2, 3, 6, 8, 24):
        cut = cut_to(launch, ranks)
        for degree, planned in (
            (cut.expert_degree, 4),
            (cut.vocab_degree, 12),
            (cut.sequence_degree, 8),
        ):
            assert ranks % degree == planned % degree == 0
    assert capsys.readouterr().out == ""
    assert cut_to(launch, 24, say=True) == launch
    assert capsys.readouterr().out == ""
    cut_to(launch, 6, say=True)
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "sequence_degree 8 -> 2, expert_degree 4 -> 2, vocab_degree 12 -> 6" in said


def test_a_rank_that_never_comes_ends_the_job_with_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "launch.json"
    path.write_text(json.dumps(_body()))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    run = subprocess.run(
        [sys.executable, "-m", "examples.job", str(path), "--tokens", "8", "--timeout", "1"],
        env={**os.environ, **alone},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 1
    assert "every rank of the job must be there" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_model_that_the_machine_cannot_hold_is_not_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = _body()
    body["model"] |= {"hidden": 8192, "vocab": 10_000_000}
    (tmp_path / "launch.json").write_text(json.dumps(body))
    assert main([str(tmp_path / "launch.json")]) == 1
    said = capsys.readouterr().err
    assert "must fit this machine's memory" in said
    assert "GiB for 2 ranks" in said


def _ranks_of(pid: int) -> list[psutil.Process]:
    """The processes that spawn has started to run a rank; its resource tracker is none."""
    children = psutil.Process(pid).children()
    return [one for one in children if one.is_running() and "spawn_main" in " ".join(one.cmdline())]


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_is_killed_ends_the_job_with_a_reason(tmp_path: Path, signal_: signal.Signals) -> None:
    path = tmp_path / "launch.json"
    path.write_text(json.dumps(_body(max_tokens_per_rank=2**20, accumulation_steps=64)))
    command = [sys.executable, "-m", "examples.job", str(path), "--tokens", "30000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as job:
        until = time.monotonic() + 60
        while not (ranks := _ranks_of(job.pid)) and time.monotonic() < until:
            time.sleep(0.05)
        ranks[0].send_signal(signal_)
        _, said = job.communicate(timeout=60)
    assert job.returncode == 1
    assert "every rank of the job must live until its end" in said
    assert signal_.name in said


def test_more_tokens_than_planned_end_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "launch.json"
    path.write_text(json.dumps(_body()))
    assert main([str(path), "--tokens", "49"]) == 1
    said = capsys.readouterr().err
    assert "N_max = 48" in said
    assert "got: 49" in said
    assert main([str(tmp_path / "none.json")]) == 1
