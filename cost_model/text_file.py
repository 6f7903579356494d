"""Text of users: files read no further than any such file goes, and characters that no database takes."""

from __future__ import annotations

import errno
import re
from pathlib import Path

MAX_BYTES = 32 * 2**20
"""Far above any config, cluster, launch or cost model; a device or a checkpoint given by mistake is not read in."""
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def read_text(path: str | Path, most: int = MAX_BYTES) -> str:
    """The text of a UTF-8 file, a byte order mark left out.

    Raises:
        OSError: it cannot be read, or holds more than ``most`` bytes (``EFBIG``).
        UnicodeDecodeError: it is not UTF-8.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(most + 1)
    except ValueError:  # a name with a NUL byte
        raise OSError(errno.EINVAL, "not a file's name") from None
    if len(content) > most:
        raise OSError(errno.EFBIG, f"more than {most} bytes")
    return content.decode("utf-8-sig")


def unstorable(data: object) -> str | None:
    """The first character inside ``data`` (keys too) that PostgreSQL or UTF-8 has no room for, as ``U+XXXX``."""
    stack = [data]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            found = _UNSTORABLE.search(value)
            if found:
                return f"U+{ord(found[0]):04X}"
        elif isinstance(value, dict):
            stack.extend(value.keys())
            stack.extend(value.values())
        elif isinstance(value, list):
            stack.extend(value)
    return None
