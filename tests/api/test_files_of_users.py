"""Files that users name, read and written: whatever they hold, a rule is named; whatever they are, none is harmed."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from api.cli.export import write_whole
from api.errors import Failure, RuleError
from api.services.specs import EXAMPLES, cluster_from_text, launch_from_mapping, model_from_file
from cost_model.cluster_file import cluster_to_mapping, load_cluster
from cost_model.hf_config import load_hf_config
from cost_model.launch import LaunchConfig
from cost_model.presets import preset
from tuner.sweeping.sweep_spec import read_sweep_file

_CONFIG = EXAMPLES / "small-moe.json"
_READERS: list[Callable[[Path], object]] = [model_from_file, load_hf_config, load_cluster, read_sweep_file]
_HARD = {
    "endless number": b'{"hidden_size": ' + b"9" * 5000 + b"}",
    "deep list": b"[" * 100_000,
    "deep object": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "cut short": b'{"hidden_size": 28',
    "nothing": b"",
    "zeros": b"\0" * 64,
    "another encoding": '{"a": "ä"}'.encode("utf-16"),
    "not text": b'{"a": "\xff\xfe"}',
    "a list": b"[1]",
}


@pytest.mark.parametrize("content", _HARD.values(), ids=_HARD.keys())
@pytest.mark.parametrize("read", _READERS, ids=lambda read: read.__name__)
def test_a_file_that_is_no_such_file_breaks_a_rule(
    tmp_path: Path, read: Callable[[Path], object], content: bytes
) -> None:
    path = tmp_path / "given.json"
    path.write_bytes(content)
    with pytest.raises(RuleError) as refused:
        read(path)
    assert refused.value.rule
    assert refused.value.remedy


@pytest.mark.parametrize("read", _READERS, ids=lambda read: read.__name__)
def test_an_endless_file_is_not_read_to_its_end(read: Callable[[Path], object]) -> None:
    with pytest.raises(RuleError, match="readable"):
        read(Path("/dev/zero"))


def test_a_byte_order_mark_is_not_part_of_the_file(tmp_path: Path) -> None:
    marked = tmp_path / "small-moe.json"
    marked.write_bytes(b"\xef\xbb\xbf" + _CONFIG.read_bytes())
    assert model_from_file(marked) == model_from_file(_CONFIG)
    assert load_hf_config(marked) == load_hf_config(_CONFIG)
    cluster = tmp_path / "cluster.json"
    cluster.write_bytes(b"\xef\xbb\xbf" + json.dumps(cluster_to_mapping(preset("hgx-h200"))).encode())
    assert load_cluster(cluster) == preset("hgx-h200")


@pytest.mark.parametrize("nodes", [0, -1, 10**12])
def test_nodes_of_a_cluster_file_have_limits(tmp_path: Path, nodes: int) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(cluster_to_mapping(preset("hgx-h200"))))
    with pytest.raises(RuleError):
        cluster_from_text(str(path), nodes)


def _launch() -> dict[str, Any]:
    return LaunchConfig(1, 8, 8, 1024, 1, 512, 2, "serial", 256, "weights", 0, "stream", 4096, 2).to_json()


def test_a_launch_with_an_unknown_key_is_not_read_as_if_it_were_not_there() -> None:
    assert launch_from_mapping({"launch": _launch()}).to_json() == _launch()
    with pytest.raises(RuleError, match="evil"):
        launch_from_mapping({"launch": {**_launch(), "evil": 1}})


def test_a_link_is_followed_and_its_target_written(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    write_whole(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    heard: list[str] = []
    reader = threading.Thread(target=lambda: heard.append(pipe.read_text()))
    reader.start()
    write_whole(pipe, "through")
    reader.join(10)
    assert heard == ["through"]
    assert pipe.is_fifo()


@pytest.mark.parametrize("name", ["", ".", "/", "gone/x.json", "nul\0byte"])
def test_a_path_that_cannot_be_a_file_breaks_a_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Failure, match="output file"):
        write_whole(Path(name), "text")
    assert not list(tmp_path.iterdir())


def test_an_interrupt_between_writing_and_naming_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "plan.json"
    kept.write_text("old")

    def interrupted(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(kept, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert kept.read_text() == "old"
