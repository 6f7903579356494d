"""Entry of a rank that another process started: ``python -m tuner.executors.rank_main PIPE LIFELINE``.

The arguments are inherited file descriptors; the first message on the pipe is the rank's ``Place``.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from tuner.executors.rank_process import serve


def main() -> None:
    pipe, lifeline = (Connection(int(descriptor)) for descriptor in sys.argv[1:3])
    serve(pipe.recv(), pipe, lifeline)


if __name__ == "__main__":
    main()
