"""Reading a small text file that a user names: never more of it than any such file can hold."""

from __future__ import annotations

import errno
from pathlib import Path

MAX_BYTES = 32 * 2**20
"""Far above any config, cluster, launch or cost model; a device or a checkpoint given by mistake is not read in."""


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
