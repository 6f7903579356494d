"""A router as numbers: for plans, for rows, for bounds."""
