"""Server-sent events: rows of the event table as they are committed, in order, resumable by id."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator

import anyio
from fastapi import Request
from fastapi.responses import StreamingResponse

from api.errors import BadRequest, Failure
from api.schemas.common import timestamp
from api.settings import Settings
from db.lifecycle import SWEEP_TERMINAL
from db.repositories import EventRepository, SweepRepository
from db.session import Database, DatabaseUnreachable
from db.tables import Event

_KEEP_ALIVE_S = 15.0
_BATCH = 200


def event_stream(
    request: Request, database: Database, settings: Settings, sweep_id: str, last_event_id: str | None
) -> StreamingResponse:
    """The stream of one sweep, from behind ``last_event_id`` on; ``end`` is sent when the sweep has ended.

    Raises:
        BadRequest: ``last_event_id`` is no event's id.
        Failure: too many streams are open.
    """
    if last_event_id and not (
        last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) <= 18
    ):
        raise BadRequest(
            rule="Last-Event-ID must be the id of an event",
            value=last_event_id,
            remedy="Send the last id that was received, or leave the header out.",
        )
    streams: set[object] = request.app.state.streams
    if len(streams) >= settings.max_streams:
        raise Failure(
            rule=f"at most {settings.max_streams} event streams are served at once",
            value=len(streams),
            remedy="Close one, or poll GET /v1/sweeps/{id}.",
        )
    body = _events(request, database, settings, sweep_id, int(last_event_id or 0))
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(body, media_type="text/event-stream", headers=headers)


async def _events(
    request: Request, database: Database, settings: Settings, sweep_id: str, last_id: int
) -> AsyncIterator[str]:
    streams: set[object] = request.app.state.streams
    ticket = object()
    streams.add(ticket)
    spoken = time.monotonic()
    try:
        yield "retry: 2000\n\n"
        while not await request.is_disconnected():
            try:
                rows, ended = await anyio.to_thread.run_sync(_read, database, sweep_id, last_id)
            except DatabaseUnreachable:  # the client comes back with the last id that it has heard
                return
            for row in rows:
                last_id, spoken = row.id, time.monotonic()
                yield _frame(row)
            if ended and len(rows) < _BATCH:
                yield f"id: {last_id}\nevent: end\ndata: {{}}\n\n"
                return
            if time.monotonic() - spoken > _KEEP_ALIVE_S:
                spoken = time.monotonic()
                yield ": still here\n\n"
            if len(rows) < _BATCH:
                await anyio.sleep(settings.event_poll_s)
    finally:
        streams.discard(ticket)


def _read(database: Database, sweep_id: str, last_id: int) -> tuple[list[Event], bool]:
    with database.reading() as session:
        # The state is read before the events: whatever ended the sweep is then among the events.
        sweep = SweepRepository(session).find(sweep_id)
        ended = sweep is None or sweep.state in SWEEP_TERMINAL
        return EventRepository(session).after(last_id, sweep_id=sweep_id, limit=_BATCH), ended


def _frame(row: Event) -> str:
    data = {
        "kind": row.kind,
        "trial_id": row.trial_id,
        "payload": row.payload_json,
        "created_at": timestamp(row.created_at),
    }
    return f"id: {row.id}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"
