"""The options that say who runs the ranks."""

from __future__ import annotations

from typing import Annotated

import typer

ExecutorOption = Annotated[
    str, typer.Option("--executor", metavar="local|ray", help="Ranks on this machine, or on a Ray cluster.")
]
RayAddressOption = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="ADDRESS",
        help="host:port, auto (this node's cluster) or ray://host:port; without it, a cluster of this machine.",
    ),
]
