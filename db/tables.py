"""The tables. Times are Unix seconds (UTC) on the database's clock; JSON columns hold JSON, never pickles."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from db.clock import database_now

Json = dict[str, Any]
# SQLite numbers rows by itself only under the exact type INTEGER.
_Serial = BigInteger().with_variant(Integer(), "sqlite")
_ID = String(40)


class Base(DeclarativeBase):
    """Names every constraint, so that a migration can change it on both databases."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {Json: JSON, list[str]: JSON, float: Double, int: BigInteger, str: Text}  # noqa: RUF012


class Sweep(Base):
    """A set of trials of one operator on one kind of target."""

    __tablename__ = "sweep"

    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    name: Mapped[str]
    operator: Mapped[str] = mapped_column(String(64), index=True)
    provider: Mapped[str] = mapped_column(String(64))
    strategy: Mapped[str] = mapped_column(String(32))
    ranks: Mapped[int] = mapped_column(Integer)
    device: Mapped[str] = mapped_column(String(16))
    hardware_id: Mapped[str | None] = mapped_column(String(128))
    """The only hardware that may run it; null: any worker with the device and enough ranks."""
    spec_json: Mapped[Json]
    max_trials: Mapped[int] = mapped_column(Integer)
    state: Mapped[str] = mapped_column(String(16), index=True)
    reason: Mapped[str | None]
    created_at: Mapped[float] = mapped_column(default=database_now())
    started_at: Mapped[float | None]
    resumed_at: Mapped[float | None]
    finished_at: Mapped[float | None]


class Trial(Base):
    """One configuration: what is asked, and the answer. ``claim_id`` fences every write while it is live."""

    __tablename__ = "trial"
    __table_args__ = (
        UniqueConstraint("sweep_id", "config_id"),
        UniqueConstraint("sweep_id", "number"),
        Index("ix_trial_state_sweep_id_number", "state", "sweep_id", "number"),
    )

    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    sweep_id: Mapped[str] = mapped_column(ForeignKey("sweep.id", ondelete="CASCADE"))
    number: Mapped[int] = mapped_column(Integer)
    config_json: Mapped[Json]
    config_id: Mapped[str] = mapped_column(String(32))
    """Hash of the canonical configuration: the same point is never run twice in a sweep."""
    proposed_by: Mapped[str] = mapped_column(String(32))
    bound_bytes: Mapped[int | None]
    """Eq. 6 bound of the operator on one rank."""
    bound_terms_json: Mapped[Json | None]
    state: Mapped[str] = mapped_column(String(16))
    reason_kind: Mapped[str | None] = mapped_column(String(32))
    """bound, device_oom, host_oom, invalid, raised, died, stalled, timeout, start, lost, wrong, cancelled."""
    reason: Mapped[str | None]
    claim_id: Mapped[str | None] = mapped_column(_ID)
    losses: Mapped[int] = mapped_column(Integer, default=0)
    cancel_requested: Mapped[bool] = mapped_column(Boolean, default=False)
    latency_s: Mapped[float | None]
    """Median of the fast mode, maximum over ranks."""
    peak_bytes: Mapped[int | None]
    """Highest peak over ranks: allocated on CUDA, tracked on CPU."""
    result_json: Mapped[Json | None]
    created_at: Mapped[float] = mapped_column(default=database_now())
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]


class Attempt(Base):
    """One try at a trial: who, under which claim, until when, how it ended. A new try is a new row."""

    __tablename__ = "attempt"
    __table_args__ = (
        UniqueConstraint("trial_id", "number"),
        UniqueConstraint("claim_id"),
        # the database itself refuses a second live attempt
        Index(
            "ix_attempt_live",
            "trial_id",
            unique=True,
            sqlite_where=text("finished_at IS NULL"),
            postgresql_where=text("finished_at IS NULL"),
        ),
        Index("ix_attempt_lease", "finished_at", "lease_expires_at"),
    )

    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    trial_id: Mapped[str] = mapped_column(ForeignKey("trial.id", ondelete="CASCADE"))
    sweep_id: Mapped[str] = mapped_column(ForeignKey("sweep.id", ondelete="CASCADE"), index=True)
    number: Mapped[int] = mapped_column(Integer)
    claim_id: Mapped[str] = mapped_column(_ID)
    worker: Mapped[str]
    lease_expires_at: Mapped[float]
    claimed_at: Mapped[float] = mapped_column(default=database_now())
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    outcome: Mapped[str | None] = mapped_column(String(16))
    """The trial state that this attempt ended in (``lost`` when its worker went away)."""
    reason_kind: Mapped[str | None] = mapped_column(String(32))
    reason: Mapped[str | None]
    hardware_id: Mapped[str | None] = mapped_column(String(128))
    software_json: Mapped[Json | None]
    log_tail: Mapped[str | None]


class Event(Base):
    """What happened, in order, never changed: the source of server-sent events."""

    __tablename__ = "event"
    __table_args__ = (Index("ix_event_sweep_id_id", "sweep_id", "id"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(_Serial, primary_key=True, autoincrement=True)
    sweep_id: Mapped[str] = mapped_column(ForeignKey("sweep.id", ondelete="CASCADE"))
    trial_id: Mapped[str | None] = mapped_column(_ID)
    kind: Mapped[str] = mapped_column(String(48))
    payload_json: Mapped[Json]
    created_at: Mapped[float] = mapped_column(default=database_now())


class Sample(Base):
    """One rank's measurement of one pass of one repeat."""

    __tablename__ = "sample"
    __table_args__ = (Index("ix_sample_operator_hardware_id", "operator", "hardware_id"),)

    id: Mapped[int] = mapped_column(_Serial, primary_key=True, autoincrement=True)
    sweep_id: Mapped[str] = mapped_column(ForeignKey("sweep.id", ondelete="CASCADE"), index=True)
    trial_id: Mapped[str] = mapped_column(ForeignKey("trial.id", ondelete="CASCADE"), index=True)
    attempt_id: Mapped[str] = mapped_column(ForeignKey("attempt.id", ondelete="CASCADE"))
    operator: Mapped[str] = mapped_column(String(64))
    provider: Mapped[str] = mapped_column(String(64))
    config_json: Mapped[Json]
    shape_json: Mapped[Json]
    ranks: Mapped[int] = mapped_column(Integer)
    pass_: Mapped[str] = mapped_column("pass", String(32))
    rank: Mapped[int] = mapped_column(Integer)
    repeat: Mapped[int] = mapped_column(Integer)
    seconds: Mapped[float]
    allocated_bytes: Mapped[int | None]
    reserved_bytes: Mapped[int | None]
    peak_source: Mapped[str] = mapped_column(String(16))
    hardware_id: Mapped[str] = mapped_column(String(128))
    operator_version: Mapped[int] = mapped_column(Integer)
    commit: Mapped[str] = mapped_column(String(64))


class Plan(Base):
    """A plan as it was answered, with the cost model it rests on."""

    __tablename__ = "plan"

    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    cost_model_id: Mapped[str | None] = mapped_column(_ID)
    verdict: Mapped[str] = mapped_column(String(16))
    plan_json: Mapped[Json]
    created_at: Mapped[float] = mapped_column(default=database_now())


class CostModelRow(Base):
    """A fitted cost model of one kind of hardware. At most one version of each is promoted."""

    __tablename__ = "cost_model"
    __table_args__ = (UniqueConstraint("hardware_id", "version"),)

    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    hardware_id: Mapped[str] = mapped_column(String(128), index=True)
    version: Mapped[int] = mapped_column(Integer)
    model_json: Mapped[Json]
    report_json: Mapped[Json | None]
    promoted: Mapped[bool] = mapped_column(Boolean, default=False)
    created_at: Mapped[float] = mapped_column(default=database_now())


class StoredModel(Base):
    """A model specification kept under a name."""

    __tablename__ = "stored_model"

    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    name: Mapped[str] = mapped_column(String(200), unique=True)
    spec_json: Mapped[Json]
    created_at: Mapped[float] = mapped_column(default=database_now())


class StoredCluster(Base):
    """A cluster specification kept under a name."""

    __tablename__ = "stored_cluster"

    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    name: Mapped[str] = mapped_column(String(200), unique=True)
    hardware_id: Mapped[str | None] = mapped_column(String(128), index=True)
    spec_json: Mapped[Json]
    created_at: Mapped[float] = mapped_column(default=database_now())


class Token(Base):
    """A bearer token; only the SHA-256 of its 256 random bits is kept."""

    __tablename__ = "token"

    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    name: Mapped[str] = mapped_column(String(200))
    token_hash: Mapped[str] = mapped_column(String(64), unique=True)
    scopes_json: Mapped[list[str]]
    created_at: Mapped[float] = mapped_column(default=database_now())
    last_used_at: Mapped[float | None]
    expires_at: Mapped[float | None]
    revoked_at: Mapped[float | None]


class IdempotencyKey(Base):
    """Which resource a client's key already made, and from what request."""

    __tablename__ = "idempotency_key"

    scope: Mapped[str] = mapped_column(String(64), primary_key=True)
    key: Mapped[str] = mapped_column(String(200), primary_key=True)
    request_hash: Mapped[str] = mapped_column(String(64))
    resource_id: Mapped[str] = mapped_column(_ID)
    created_at: Mapped[float] = mapped_column(default=database_now())
