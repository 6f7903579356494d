"""What every benchmark's rows share: the samples' columns, the hardware's fingerprint and the commit."""

from __future__ import annotations

import os
import subprocess

import torch

COLUMNS = [
    *("operator", "provider", "config_json", "shape_json", "pass", "rank", "repeat", "seconds"),
    *("allocated_bytes", "reserved_bytes", "peak_source", "hardware_id", "operator_version", "commit"),
]


def hardware_id() -> str:
    """The fingerprint sweeps use; a plain name where only torch is installed."""
    try:
        from tuner.machine.fingerprint import local_hardware_id
    except ImportError:  # the base install has torch only
        return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return local_hardware_id()


def commit() -> str:
    """The source revision: ``$FLATPEAK_COMMIT`` where the tree travels without its history, else git's."""
    if named := os.environ.get("FLATPEAK_COMMIT"):
        return named
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
