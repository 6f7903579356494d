"""Tables, repositories and migrations: what flatpeak remembers, in SQLite or PostgreSQL."""
