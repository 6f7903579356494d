"""Measurements that ship with the package: of one H200, and of two on one host.

They were taken with sketches of the operators, before the operators themselves existed: ``commit`` says
``sketch`` and ``operator_version`` is 0, so a fit never mixes them with runs of the released operators.
"""

from cost_model.reference.load import Curve, known_hardware, load_public_cases, load_rates, load_samples

__all__ = ["Curve", "known_hardware", "load_public_cases", "load_rates", "load_samples"]
