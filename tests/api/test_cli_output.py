"""Where output cannot go, and databases of another release: a rule and a non-zero exit, never a traceback."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from db.session import Database


def _run(words: str, redirect: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", "-c", f'exec "{sys.executable}" -m api.cli {words} {redirect}'],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin"},
        cwd=folder,
    )


@pytest.mark.parametrize(
    ("json_flag", "redirect"), [("--json", ">/dev/full"), ("", ">/dev/full"), ("--json", ">&-")]
)
def test_an_output_that_takes_nothing_fails_with_a_rule(
    tmp_path: Path, json_flag: str, redirect: str
) -> None:
    done = _run(f"sweep list --database sqlite:///{tmp_path}/a.db {json_flag}", redirect, tmp_path)
    assert done.returncode == 1
    assert "standard output must be open" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", ["sweep list", "db check", "db migrate"])
def test_a_database_of_a_newer_release_is_left_alone(tmp_path: Path, words: str) -> None:
    file = tmp_path / "newer.db"
    store = Database(f"sqlite:///{file}")
    store.migrate()
    store.check_schema()
    store.close()
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    done = _run(f"{words} --database sqlite:///{file} --json", "", tmp_path)
    assert done.returncode in (1, 2)
    said = json.loads(done.stderr)
    assert "newer" in said["rule"]
    assert "9999" in said["value"]
    with sqlite3.connect(file) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [("9999",)]
    connection.close()
