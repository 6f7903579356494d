"""Sweeps: from the file that a user writes to trials that are claimed, run and settled."""
