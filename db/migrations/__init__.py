"""Alembic migrations, shipped with the package and run by ``Database.migrate``."""
