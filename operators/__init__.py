"""Exact streaming operators for long-context Mixture-of-Experts training.

Importing this package imports no torch: ``operators.launch`` and ``operators.least_loaded`` must stay usable
where only a planner runs. Import an operator from its own module.
"""
