"""Who runs the ranks of a trial."""
