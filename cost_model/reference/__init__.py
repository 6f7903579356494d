"""Measurements that ship with the package: of one H200, and of two on one host.

Rows with commit ``sketch`` were taken with sketches of the operators, before the operators themselves existed;
their ``operator_version`` is 0, so a fit never mixes them with the rest. The others are sweeps of the operators
over NCCL on two cards of one host.
"""

from cost_model.reference.load import Curve, known_hardware, load_public_cases, load_rates, load_samples

__all__ = ["Curve", "known_hardware", "load_public_cases", "load_rates", "load_samples"]
