"""The supervisor's end of the line to one rank: never waits for a rank that stops in the middle of a word."""

from __future__ import annotations

import select
import socket
import struct
import traceback
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from time import monotonic
from typing import Any

_CHUNK_BYTES = 2**18
# A rank that talks without end does not keep its supervisor from the others.
_CHUNKS_AT_ONCE = 64
_SAY_S = 5.0


class Line:
    """Messages to and from a rank, which holds a ``multiprocessing`` connection at the other end.

    Both speak its framing: the length in 4 bytes, signed and big-endian (-1: in the 8 bytes after), then a pickle.
    """

    def __init__(self, ours: socket.socket) -> None:
        ours.setblocking(False)
        self._ours = ours
        self._unread = bytearray()

    @classmethod
    def pair(cls) -> tuple[Line, Connection]:
        """A line, and its other end."""
        ours, theirs = socket.socketpair()
        return cls(ours), Connection(theirs.detach())

    def fileno(self) -> int:
        return self._ours.fileno()

    def say(self, message: Any) -> None:
        """Send a message.

        Raises:
            OSError: the rank is gone, or has not listened for some seconds.
        """
        body = bytes(ForkingPickler.dumps(message))
        short = len(body) < 2**31
        left = memoryview(
            (struct.pack("!i", len(body)) if short else struct.pack("!iQ", -1, len(body))) + body
        )
        until = monotonic() + _SAY_S
        while left:
            try:
                left = left[self._ours.send(left) :]
            except BlockingIOError:
                room = select.poll()
                room.register(self, select.POLLOUT)
                if not room.poll(1000 * max(0.0, until - monotonic())):
                    raise

    def hear(self) -> tuple[list[Any], bool]:
        """Whole messages that have come, and whether the other end is gone and everything was read.

        Raises:
            ValueError: what came is no message.
        """
        gone = False
        for _ in range(_CHUNKS_AT_ONCE):
            try:
                chunk = self._ours.recv(_CHUNK_BYTES)
            except BlockingIOError:
                break
            except OSError:
                chunk = b""
            if not chunk:
                gone = True
                break
            self._unread += chunk
        return self._whole(), gone

    def at_end(self) -> bool:
        """Whether the other end is gone and everything it said was read; nothing is taken from the line."""
        try:
            return self._ours.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self._ours.close()

    def _whole(self) -> list[Any]:
        messages = []
        start = 0
        while (body := _body(self._unread, start)) is not None and body.stop <= len(self._unread):
            messages.append(_loaded(bytes(self._unread[body.start : body.stop])))
            start = body.stop
        del self._unread[:start]
        return messages


def _body(unread: bytearray, start: int) -> range | None:
    """Where the message that begins at ``start`` has its pickle; None while nobody can tell."""
    head = start + 4
    if len(unread) < head:
        return None
    (length,) = struct.unpack_from("!i", unread, start)
    if length == -1:
        if len(unread) < head + 8:
            return None
        (length,) = struct.unpack_from("!Q", unread, head)
        head += 8
    if length < 0:
        raise ValueError(f"a message of {length} bytes")
    return range(head, head + length)


def _loaded(body: bytes) -> Any:
    try:
        message = ForkingPickler.loads(body)
    except (Exception, SystemExit) as error:  # whatever a rank's object does when it is built again
        raise ValueError(traceback.format_exception_only(error)[-1].strip()) from None
    if not (isinstance(message, tuple) and message):
        raise ValueError(f"a {type(message).__name__}")
    return message
