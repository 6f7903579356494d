"""What is shipped: five packages at the wheel's top level with their data, and torch alone as a base requirement."""

from __future__ import annotations

import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"api", "tuner", "operators", "cost_model", "db"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    built = next(iter(WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("dist")))))
    return zipfile.ZipFile(built)


def test_the_top_level_is_the_five_packages(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/", 1)[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == PACKAGES


def test_data_files_travel_with_their_package(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    for needed in (
        "operators/launch.schema.json",
        "operators/kernels/host_adamw.c",
        "api/web/templates/base.html",
        "api/web/static/vendor/echarts.common.min.js",
        "cost_model/reference/rates.json",
    ):
        assert needed in names
    assert any(name.startswith("db/migrations/versions/") for name in names)


def test_a_training_job_needs_torch_alone(wheel: zipfile.ZipFile) -> None:
    metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    requirements = Parser().parsestr(wheel.read(metadata).decode()).get_all("Requires-Dist", [])
    assert [line for line in requirements if "extra ==" not in line] == ["torch>=2.11"]
