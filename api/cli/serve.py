"""``flatpeak serve``: the HTTP API and the pages."""

from __future__ import annotations

import socket
from typing import Annotated

import typer

from api.cli.console import DatabaseOption, JsonFlag, emit_json, err
from api.errors import Failure, RuleError

BACKLOG = 128


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve")(serve)


def serve(
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")] = 8642,
    require_token: Annotated[
        bool, typer.Option("--require-token", help="Ask for tokens on loopback too.")
    ] = False,
    database: DatabaseOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Serve the API under /v1 and the pages at /. Sweeps are executed by `flatpeak worker`, not here.

    Example:

      flatpeak serve --port 8000

    On an address other machines can reach, every request needs a token, and one must exist.
    """
    import uvicorn

    from api.app import create_app
    from api.auth import require_a_token
    from api.settings import Settings, is_loopback

    tokens = require_token or not is_loopback(host)
    listener = listen(host, port)
    try:
        app = create_app(Settings(database_url=database, tokens_required=tokens))
        if tokens:
            require_a_token(app.state.database, host)
        bound = listener.getsockname()[1]
        address = f"http://{f'[{host}]' if ':' in host else host}:{bound}"
        if as_json:
            emit_json({"address": address, "tokens_required": tokens})
        else:
            err.print(
                f"flatpeak at {address}/ (tokens {'required' if tokens else 'not required'})", markup=False
            )
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=3, server_header=False)
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        listener.close()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        Failure: the port is in use, or may not be opened.
        RuleError: the host has no address here.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise RuleError(
            rule="host must be an address or a name of this machine",
            value=host,
            remedy=f"Use 127.0.0.1, 0.0.0.0 or a name that resolves ({error.strerror}).",
        ) from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise Failure(
            rule="the port must be free and open to this user",
            value=f"{host}:{port}",
            remedy=f"Choose another with --port, or 0 for a free one ({error.strerror}).",
        ) from error
    return listener
