"""What is committed beside the code stays true: the OpenAPI document and the vendored scripts."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from api.app import STATIC, create_app
from api.settings import Settings

ROOT = Path(__file__).parents[2]
VENDOR = STATIC / "vendor"


def test_the_committed_openapi_document_is_current(database_url: str) -> None:
    app = create_app(Settings(database_url=database_url))
    written = json.loads((ROOT / "docs" / "openapi.json").read_text())
    current = json.loads(json.dumps(app.openapi()))
    app.state.database.close()
    assert written == current, "write it anew: python -m api.openapi"


def test_every_vendored_file_is_in_the_manifest_unchanged() -> None:
    manifest = json.loads((VENDOR / "manifest.json").read_text())
    listed = {
        entry["file"]: entry["sha256"] for package in manifest["packages"] for entry in package["files"]
    }
    there = {path.name for path in VENDOR.iterdir()} - {"manifest.json"}
    assert there == set(listed)
    for name, digest in listed.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest, name
    for package in manifest["packages"]:
        assert package["licence"] in ("Apache-2.0", "0BSD")
        assert re.fullmatch(r"\d+\.\d+\.\d+", package["version"])
    assert sum(path.stat().st_size for path in VENDOR.iterdir()) < 2_000_000


def test_pages_load_nothing_from_elsewhere_and_have_no_inline_code() -> None:
    for template in (STATIC.parent / "templates").glob("*.html"):
        text = template.read_text()
        assert not re.search(r"<script(?![^>]*\bsrc=)", text), template.name
        assert not re.search(r"\son[a-z]+=", text), template.name
        assert not re.search(r"\sstyle=", text), template.name
        assert "https://" not in text, template.name
        assert "http://" not in text.replace("http://www.w3.org", ""), template.name
