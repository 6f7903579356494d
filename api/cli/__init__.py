"""The command line: ``flatpeak plan | check | sweep | replay | fit | export | probe | serve | worker | db | token``."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import typer
from pydantic import ValidationError

from api.cli.app import build
from api.cli.console import emit_error, err
from api.errors import broken_rule, exit_code
from cost_model.field_rules import rule_of

# Typer carries click inside itself; its usage errors are reached through the one class it publishes.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 does not fit or failed, 2 wrong use."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in words
    if not words:
        build()(args=["--help"], prog_name="flatpeak", standalone_mode=False)
        return 2
    try:
        code = build()(args=words, prog_name="flatpeak", standalone_mode=False)
    except typer.Exit as stop:
        return int(stop.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        err.print("Stopped.")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader went away (`flatpeak ... | head`): nothing is wrong, and nothing more can be printed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if not _is_stdout(error):
            raise
        return _no_output(error, as_json=as_json)
    except Exception as error:
        broken = broken_rule(error, in_shell=True)
        if broken is None and isinstance(error, _USAGE_ERROR):
            broken = _usage(error, words)
            emit_error(*broken, as_json=as_json)
            return 2
        if broken is None:
            raise
        emit_error(*broken, as_json=as_json)
        return exit_code(error)
    return code if isinstance(code, int) else 0


def _is_stdout(error: OSError) -> bool:
    """Whether standard output is what failed: closed by the caller, or on a full disk."""
    if error.filename is not None:
        return False
    try:
        os.write(1, b"")
    except OSError:
        return True
    return error.errno in (errno.ENOSPC, errno.EIO, errno.EBADF)


def _no_output(error: OSError, *, as_json: bool) -> int:
    emit_error(
        "standard output must be open and have room",
        error.strerror or str(error),
        "Send the output somewhere that takes it, or free some space.",
        as_json=as_json,
    )
    # What is left in the buffer cannot be written; the interpreter would try once more at its end.
    sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    return 1


def _usage(error: Exception, words: list[str]) -> tuple[str, object, str]:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "flatpeak"
    remedy = f"Run `{command} --help`: it shows an example."
    option, cause = getattr(error, "param", None), error.__cause__
    if option is not None and isinstance(cause, ValidationError):
        finding = cause.errors()[0]
        given, name = finding["input"], getattr(option, "metavar", None) or option.name
        if option.param_type_name == "option":
            name = max(option.opts, key=len)
        rule = rule_of(finding).rstrip(".").removeprefix(f"{given!r} is not ")
        return f"{name} {rule if rule.startswith('must') else f'must be {rule}'}", given, remedy
    message = getattr(error, "format_message", lambda: str(error))()
    return message, " ".join(words), remedy
