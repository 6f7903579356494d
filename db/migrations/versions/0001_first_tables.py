"""First tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "cost_model",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("hardware_id", sa.String(length=128), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("model_json", sa.JSON(), nullable=False),
        sa.Column("report_json", sa.JSON(), nullable=True),
        sa.Column("promoted", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_cost_model")),
        sa.UniqueConstraint("hardware_id", "version", name=op.f("uq_cost_model_hardware_id_version")),
    )
    with op.batch_alter_table("cost_model", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_cost_model_hardware_id"), ["hardware_id"], unique=False)

    op.create_table(
        "idempotency_key",
        sa.Column("scope", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(length=200), nullable=False),
        sa.Column("request_hash", sa.String(length=64), nullable=False),
        sa.Column("resource_id", sa.String(length=40), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("scope", "key", name=op.f("pk_idempotency_key")),
    )
    op.create_table(
        "plan",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("cost_model_id", sa.String(length=40), nullable=True),
        sa.Column("verdict", sa.String(length=16), nullable=False),
        sa.Column("plan_json", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_plan")),
    )
    op.create_table(
        "stored_cluster",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("hardware_id", sa.String(length=128), nullable=True),
        sa.Column("spec_json", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_stored_cluster")),
        sa.UniqueConstraint("name", name=op.f("uq_stored_cluster_name")),
    )
    with op.batch_alter_table("stored_cluster", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_stored_cluster_hardware_id"), ["hardware_id"], unique=False)

    op.create_table(
        "stored_model",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("spec_json", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_stored_model")),
        sa.UniqueConstraint("name", name=op.f("uq_stored_model_name")),
    )
    op.create_table(
        "sweep",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("operator", sa.String(length=64), nullable=False),
        sa.Column("provider", sa.String(length=64), nullable=False),
        sa.Column("strategy", sa.String(length=32), nullable=False),
        sa.Column("ranks", sa.Integer(), nullable=False),
        sa.Column("device", sa.String(length=16), nullable=False),
        sa.Column("hardware_id", sa.String(length=128), nullable=True),
        sa.Column("spec_json", sa.JSON(), nullable=False),
        sa.Column("max_trials", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("resumed_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sweep")),
    )
    with op.batch_alter_table("sweep", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_sweep_operator"), ["operator"], unique=False)
        batch_op.create_index(batch_op.f("ix_sweep_state"), ["state"], unique=False)

    op.create_table(
        "token",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("token_hash", sa.String(length=64), nullable=False),
        sa.Column("scopes_json", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("last_used_at", sa.Double(), nullable=True),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_token")),
        sa.UniqueConstraint("token_hash", name=op.f("uq_token_token_hash")),
    )
    op.create_table(
        "event",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("sweep_id", sa.String(length=40), nullable=False),
        sa.Column("trial_id", sa.String(length=40), nullable=True),
        sa.Column("kind", sa.String(length=48), nullable=False),
        sa.Column("payload_json", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["sweep_id"], ["sweep.id"], name=op.f("fk_event_sweep_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_event")),
        sqlite_autoincrement=True,
    )
    with op.batch_alter_table("event", schema=None) as batch_op:
        batch_op.create_index("ix_event_sweep_id_id", ["sweep_id", "id"], unique=False)

    op.create_table(
        "trial",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("sweep_id", sa.String(length=40), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("config_json", sa.JSON(), nullable=False),
        sa.Column("config_id", sa.String(length=32), nullable=False),
        sa.Column("proposed_by", sa.String(length=32), nullable=False),
        sa.Column("bound_bytes", sa.BigInteger(), nullable=True),
        sa.Column("bound_terms_json", sa.JSON(), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason_kind", sa.String(length=32), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("claim_id", sa.String(length=40), nullable=True),
        sa.Column("losses", sa.Integer(), nullable=False),
        sa.Column("cancel_requested", sa.Boolean(), nullable=False),
        sa.Column("latency_s", sa.Double(), nullable=True),
        sa.Column("peak_bytes", sa.BigInteger(), nullable=True),
        sa.Column("result_json", sa.JSON(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["sweep_id"], ["sweep.id"], name=op.f("fk_trial_sweep_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_trial")),
        sa.UniqueConstraint("sweep_id", "config_id", name=op.f("uq_trial_sweep_id_config_id")),
        sa.UniqueConstraint("sweep_id", "number", name=op.f("uq_trial_sweep_id_number")),
    )
    with op.batch_alter_table("trial", schema=None) as batch_op:
        batch_op.create_index("ix_trial_state_sweep_id_number", ["state", "sweep_id", "number"], unique=False)

    op.create_table(
        "attempt",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("trial_id", sa.String(length=40), nullable=False),
        sa.Column("sweep_id", sa.String(length=40), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("claim_id", sa.String(length=40), nullable=False),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("lease_expires_at", sa.Double(), nullable=False),
        sa.Column("claimed_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("outcome", sa.String(length=16), nullable=True),
        sa.Column("reason_kind", sa.String(length=32), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("hardware_id", sa.String(length=128), nullable=True),
        sa.Column("software_json", sa.JSON(), nullable=True),
        sa.Column("log_tail", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["sweep_id"], ["sweep.id"], name=op.f("fk_attempt_sweep_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["trial_id"], ["trial.id"], name=op.f("fk_attempt_trial_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_attempt")),
        sa.UniqueConstraint("claim_id", name=op.f("uq_attempt_claim_id")),
        sa.UniqueConstraint("trial_id", "number", name=op.f("uq_attempt_trial_id_number")),
    )
    with op.batch_alter_table("attempt", schema=None) as batch_op:
        batch_op.create_index("ix_attempt_lease", ["finished_at", "lease_expires_at"], unique=False)
        batch_op.create_index(
            "ix_attempt_live",
            ["trial_id"],
            unique=True,
            sqlite_where=sa.text("finished_at IS NULL"),
            postgresql_where=sa.text("finished_at IS NULL"),
        )
        batch_op.create_index(batch_op.f("ix_attempt_sweep_id"), ["sweep_id"], unique=False)

    op.create_table(
        "sample",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("sweep_id", sa.String(length=40), nullable=False),
        sa.Column("trial_id", sa.String(length=40), nullable=False),
        sa.Column("attempt_id", sa.String(length=40), nullable=False),
        sa.Column("operator", sa.String(length=64), nullable=False),
        sa.Column("provider", sa.String(length=64), nullable=False),
        sa.Column("config_json", sa.JSON(), nullable=False),
        sa.Column("shape_json", sa.JSON(), nullable=False),
        sa.Column("ranks", sa.Integer(), nullable=False),
        sa.Column("pass", sa.String(length=32), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("repeat", sa.Integer(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("allocated_bytes", sa.BigInteger(), nullable=True),
        sa.Column("reserved_bytes", sa.BigInteger(), nullable=True),
        sa.Column("peak_source", sa.String(length=16), nullable=False),
        sa.Column("hardware_id", sa.String(length=128), nullable=False),
        sa.Column("operator_version", sa.Integer(), nullable=False),
        sa.Column("commit", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(
            ["attempt_id"], ["attempt.id"], name=op.f("fk_sample_attempt_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["sweep_id"], ["sweep.id"], name=op.f("fk_sample_sweep_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["trial_id"], ["trial.id"], name=op.f("fk_sample_trial_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sample")),
    )
    with op.batch_alter_table("sample", schema=None) as batch_op:
        batch_op.create_index("ix_sample_operator_hardware_id", ["operator", "hardware_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_sample_sweep_id"), ["sweep_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_sample_trial_id"), ["trial_id"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("sample", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_sample_trial_id"))
        batch_op.drop_index(batch_op.f("ix_sample_sweep_id"))
        batch_op.drop_index("ix_sample_operator_hardware_id")

    op.drop_table("sample")
    with op.batch_alter_table("attempt", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_attempt_sweep_id"))
        batch_op.drop_index(
            "ix_attempt_live",
            sqlite_where=sa.text("finished_at IS NULL"),
            postgresql_where=sa.text("finished_at IS NULL"),
        )
        batch_op.drop_index("ix_attempt_lease")

    op.drop_table("attempt")
    with op.batch_alter_table("trial", schema=None) as batch_op:
        batch_op.drop_index("ix_trial_state_sweep_id_number")

    op.drop_table("trial")
    with op.batch_alter_table("event", schema=None) as batch_op:
        batch_op.drop_index("ix_event_sweep_id_id")

    op.drop_table("event")
    op.drop_table("token")
    with op.batch_alter_table("sweep", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_sweep_state"))
        batch_op.drop_index(batch_op.f("ix_sweep_operator"))

    op.drop_table("sweep")
    op.drop_table("stored_model")
    with op.batch_alter_table("stored_cluster", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_stored_cluster_hardware_id"))

    op.drop_table("stored_cluster")
    op.drop_table("plan")
    op.drop_table("idempotency_key")
    with op.batch_alter_table("cost_model", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_cost_model_hardware_id"))

    op.drop_table("cost_model")
