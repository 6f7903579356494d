"""Strategies over recorded sweeps, offline."""
