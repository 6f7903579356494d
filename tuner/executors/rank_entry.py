"""Where a rank's process begins: whoever starts one need not load torch for it."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

from tuner.executors.place import Place


def serve(place: Place, pipe: Connection, lifeline: Connection) -> None:
    """Body of the process; the fork server has loaded what this imports."""
    os.setsid()  # what the rank starts is in its group, and ends with it
    from tuner.executors.rank_process import serve as body

    body(place, pipe, lifeline)
