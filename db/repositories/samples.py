"""Samples: raw rows per rank, pass and repeat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from sqlalchemy import Select, select
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
        query: Select[Sample, Json | None] = (
            select(Sample, Attempt.software_json)
            .join(Attempt, Attempt.id == Sample.attempt_id)
            .join(Trial, Trial.id == Sample.trial_id)
            .where(Trial.state == "succeeded")
            .order_by(Sample.id)
        )
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
        rows = [
            (
                sample.id,
                sample.sweep_id,
                sample.trial_id,
                sample.operator,
                sample.provider,
                _text(sample.config_json),
                _text(sample.shape_json),
                sample.ranks,
                sample.pass_,
                sample.rank,
                sample.repeat,
                sample.seconds,
                sample.allocated_bytes,
                sample.reserved_bytes,
                sample.peak_source,
                sample.hardware_id,
                _text(software or {}),
                sample.operator_version,
                sample.commit,
            )
            for sample, software in self._session.execute(query)
        ]
        return pd.DataFrame(rows, columns=list(COLUMNS)).astype(
            {"seconds": "float64", "allocated_bytes": "Int64", "reserved_bytes": "Int64"}
        )


def _text(value: Json) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
