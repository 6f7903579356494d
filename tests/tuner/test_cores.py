"""Cores are those that a process may use, and the fingerprint counts them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tuner.machine.cores import usable_cores
from tuner.machine.fingerprint import bare_cluster, local_hardware


def put(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 4, 6})


def test_a_thread_bound_to_a_core_has_one() -> None:
    def bound() -> int:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        return usable_cores()

    with ThreadPoolExecutor(1) as pool:  # its thread ends with it
        assert pool.submit(bound).result() == 1


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 4), ("200000 100000", 2), ("250000 100000", 3), ("5000 100000", 1), ("900000 100000", 4)],
)
def test_a_quota_grants_no_more_than_its_cores(tmp_path: Path, quota: str, cores: int) -> None:
    root = put(tmp_path, proc__self__cgroup="0::/job/step\n", sys__fs__cgroup__job__cpu_dot_max=quota + "\n")
    assert usable_cores(root) == cores


@pytest.mark.usefixtures("four")
def test_quotas_of_the_older_groups_and_of_a_container_s_own(tmp_path: Path) -> None:
    of_job = "sys__fs__cgroup__cpu,cpuacct__job__cpu_dot_cfs_"
    root = put(
        tmp_path / "v1",
        proc__self__cgroup="4:memory:/job\n3:cpu,cpuacct:/job\n",
        **{of_job + "quota_us": "100000", of_job + "period_us": "100000"},
    )
    assert usable_cores(root) == 1
    put(root, **{of_job + "quota_us": "-1"})
    assert usable_cores(root) == 4
    inside = put(tmp_path / "v2", proc__self__cgroup="0::/x/y", sys__fs__cgroup__cpu_dot_max="300000 100000")
    assert usable_cores(inside) == 3
    assert usable_cores(tmp_path / "nothing") == 4


def test_the_fingerprint_counts_usable_cores() -> None:
    here = local_hardware("cpu")
    assert here["cores"] == here["sm_count"] == usable_cores()
    fewer = {**here, "cores": here["cores"] + 1}
    assert bare_cluster(fewer).hardware_id != bare_cluster(here).hardware_id
