"""Samples of the operators as they are now: what an older version took says nothing of this one."""

from __future__ import annotations

import pandas as pd

from tuner.registry import load_adapter, operator_names


def current_rows(samples: pd.DataFrame) -> pd.DataFrame:
    """The rows of each operator's present ``version``.

    A row without ``operator_version`` stays, and so do those of an operator that is not of the registry.
    """
    if "operator_version" not in samples.columns:
        return samples
    known = {
        name: load_adapter(name).version for name in set(samples["operator"]).intersection(operator_names())
    }
    wanted = samples["operator"].map(known)
    given = samples["operator_version"]
    return samples[given.isna() | wanted.isna() | (given == wanted)]
