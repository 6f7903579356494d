"""Samples: raw rows per rank, pass and repeat."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from sqlalchemy import Select, Text, cast, select
from sqlalchemy.orm import Session

from db.repositories.trials import Claim
from db.tables import Attempt, Json, Sample, Trial

COLUMNS = (
    "sample_id",
    "sweep_id",
    "trial_id",
    "operator",
    "provider",
    "config_json",
    "shape_json",
    "ranks",
    "pass",
    "rank",
    "repeat",
    "seconds",
    "allocated_bytes",
    "reserved_bytes",
    "peak_source",
    "hardware_id",
    "software_json",
    "operator_version",
    "commit",
)
SampleRow = tuple[Any, ...]
"""A sample's values in the order of :data:`COLUMNS`."""
_JSON_PLACES = tuple(place for place, name in enumerate(COLUMNS) if name.endswith("_json"))
_BATCH = 1000


@dataclass(frozen=True, slots=True)
class NewSample:
    """One rank's measurement of one pass of one repeat."""

    pass_: str
    rank: int
    repeat: int
    seconds: float
    allocated_bytes: int | None
    reserved_bytes: int | None
    peak_source: str


class SampleRepository:
    """Rows of ``sample``."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(
        self,
        claim: Claim,
        samples: Sequence[NewSample],
        *,
        operator: str,
        provider: str,
        shape: Json,
        ranks: int,
        hardware_id: str,
        operator_version: int,
        commit: str,
    ) -> None:
        """Store a trial's samples. Call it in the transaction that finishes the trial: both or neither."""
        self._session.add_all(
            Sample(
                sweep_id=claim.trial.sweep_id,
                trial_id=claim.trial.id,
                attempt_id=claim.attempt.id,
                operator=operator,
                provider=provider,
                config_json=claim.trial.config_json,
                shape_json=shape,
                ranks=ranks,
                pass_=new.pass_,
                rank=new.rank,
                repeat=new.repeat,
                seconds=new.seconds,
                allocated_bytes=new.allocated_bytes,
                reserved_bytes=new.reserved_bytes,
                peak_source=new.peak_source,
                hardware_id=hardware_id,
                operator_version=operator_version,
                commit=commit,
            )
            for new in samples
        )
        self._session.flush()

    def flagged_trials(self) -> set[str]:
        """Trials that succeeded, but whose times are in doubt: their result has flags."""
        query = select(Trial.id, Trial.result_json["flags"]).where(Trial.state == "succeeded")
        return {trial_id for trial_id, flags in self._session.execute(query) if flags}

    def of_trial(self, trial_id: str) -> list[Sample]:
        """A trial's samples by pass, repeat and rank."""
        query = select(Sample).where(Sample.trial_id == trial_id)
        return list(self._session.scalars(query.order_by(Sample.pass_, Sample.repeat, Sample.rank)))

    def frame(
        self,
        *,
        sweep_id: str | None = None,
        trial_id: str | None = None,
        operator: str | None = None,
        provider: str | None = None,
        hardware_id: str | None = None,
    ) -> pd.DataFrame:
        """Samples of trials that succeeded, one row each, in the columns :data:`COLUMNS`.

        ``config_json``, ``shape_json`` and ``software_json`` hold JSON text with sorted keys, so that rows
        group by them and the frame goes through CSV unchanged.
        """
        query = _of_successful_trials()
        wanted = {
            Sample.sweep_id: sweep_id,
            Sample.trial_id: trial_id,
            Sample.operator: operator,
            Sample.provider: provider,
            Sample.hardware_id: hardware_id,
        }
        for column, value in wanted.items():
            if value is not None:
                query = query.where(column == value)
        found = self._session.execute(query.execution_options(yield_per=_BATCH))
        return pd.DataFrame(_plain(found), columns=list(COLUMNS)).astype(
            {"seconds": "float64", "allocated_bytes": "Int64", "reserved_bytes": "Int64"}
        )

    def page(self, sweep_id: str, *, after: int = 0, limit: int = 1000) -> list[SampleRow]:
        """At most ``limit`` samples of a sweep's successful trials with an id above ``after``, by id.

        Each is a tuple in the order of :data:`COLUMNS`, as :meth:`frame` has them. Read on behind the last id: rows
        are only ever added with larger ones, so that every row is met once.
        """
        query = _of_successful_trials().where(Sample.sweep_id == sweep_id, Sample.id > after).limit(limit)
        return list(_plain(self._session.execute(query)))


def _of_successful_trials() -> Select[*tuple[Any, ...]]:
    # JSON is read as text: it is the same for all rows of a trial, and is parsed once
    columns = (
        Sample.id,
        Sample.sweep_id,
        Sample.trial_id,
        Sample.operator,
        Sample.provider,
        cast(Sample.config_json, Text),
        cast(Sample.shape_json, Text),
        Sample.ranks,
        Sample.pass_,
        Sample.rank,
        Sample.repeat,
        Sample.seconds,
        Sample.allocated_bytes,
        Sample.reserved_bytes,
        Sample.peak_source,
        Sample.hardware_id,
        cast(Attempt.software_json, Text),
        Sample.operator_version,
        Sample.commit,
    )
    return (
        select(*columns)
        .join(Attempt, Attempt.id == Sample.attempt_id)
        .join(Trial, Trial.id == Sample.trial_id)
        .where(Trial.state == "succeeded")
        .order_by(Sample.id)
    )


def _plain(rows: Iterable[Sequence[Any]]) -> Iterator[SampleRow]:
    """Rows with their JSON in one spelling; equal texts are one object."""
    known: dict[str | None, str] = {}
    for row in rows:
        values = list(row)
        for place in _JSON_PLACES:
            text = values[place]
            if text not in known:
                known[text] = _text(json.loads(text or "{}") or {})
            values[place] = known[text]
        yield tuple(values)


def _text(value: Json) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
