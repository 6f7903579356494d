"""The database's clock: the only one that leases are measured on, as hosts' clocks disagree."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Double
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import GenericFunction


class database_now(GenericFunction[float]):  # noqa: N801 - reads as the SQL function that it is
    """Seconds since 1970 (UTC) at this moment on the database's clock, inside a transaction too."""

    type = Double()
    inherit_cache = True


@compiles(database_now, "sqlite")
def _sqlite_now(element: database_now, compiler: Any, **kw: Any) -> str:
    del element, compiler, kw
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(database_now, "postgresql")
def _postgresql_now(element: database_now, compiler: Any, **kw: Any) -> str:
    del element, compiler, kw
    return "CAST(extract(epoch FROM clock_timestamp()) AS DOUBLE PRECISION)"
