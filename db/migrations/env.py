"""Run by Alembic for each command, on the connection that ``Database.migrate`` opened."""

from __future__ import annotations

from alembic import context

from db.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    # SQLite changes tables by copying them; both databases roll a failed migration back as a whole
    render_as_batch=True,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
