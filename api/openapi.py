"""``python -m api.openapi``: write docs/openapi.json anew."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from api.app import create_app
from api.settings import Settings

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "openapi.json"


def main() -> None:
    """Build the application on an empty database and write its document."""
    with tempfile.TemporaryDirectory() as folder:
        app = create_app(Settings(database_url=f"sqlite:///{folder}/flatpeak.db"))
        DOCUMENT.write_text(json.dumps(app.openapi(), indent=1) + "\n", encoding="utf-8")
        app.state.database.close()


if __name__ == "__main__":
    main()
