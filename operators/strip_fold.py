"""The online softmax fold over vocabulary strips.

Shapes: S shards, N tokens. A strip leaves three numbers a token: its largest logit m, z = Σ e^{y − m} over the
strip, and the target's logit t (0 where the target lies in another strip). Folding two of them:

    m = max(m₁, m₂);  z = e^{m₁ − m} z₁ + e^{m₂ − m} z₂;  t = t₁ + t₂;  loss = m + log z − t.

An empty strip, or one whose logits are all −∞, is the neutral element (m = −∞, z = 0, t = 0): differences with
−∞ are taken against 0 instead, so it never yields a NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

STATISTICS = 3
"""Numbers a token per strip: m, z, t."""


def neutral(statistics_N3: Tensor) -> None:
    """Fill ``[N, 3]`` with the neutral element, in place."""
    statistics_N3[:, 0].fill_(-torch.inf)
    statistics_N3[:, 1:].zero_()


def merge(first_N3: Tensor, second_N3: Tensor) -> Tensor:
    """Fold two strips' statistics ``[N, 3]`` into one (fp32 or fp64, same dtype)."""
    top_N = torch.maximum(first_N3[:, 0], second_N3[:, 0])
    reference_N = torch.where(top_N == -torch.inf, 0.0, top_N)
    z_N = first_N3[:, 1] * torch.exp(first_N3[:, 0] - reference_N)
    z_N = z_N + second_N3[:, 1] * torch.exp(second_N3[:, 0] - reference_N)
    return torch.stack((top_N, z_N, first_N3[:, 2] + second_N3[:, 2]), dim=1)


def fold(statistics_SN3: Tensor) -> tuple[Tensor, Tensor]:
    """Fold the strips of all shards in shard order.

    The order is that of the vocabulary, whatever order the strips were computed in, so ranks that hold the
    same token agree on its loss bit for bit.

    Returns:
        ``(log_sum_exp_N, target_logit_N)``; a token without any finite logit has log-sum-exp −∞.
    """
    state_N3 = statistics_SN3[0]
    for shard in range(1, statistics_SN3.shape[0]):
        state_N3 = merge(state_N3, statistics_SN3[shard])
    return state_N3[:, 0] + torch.log(state_N3[:, 1]), state_N3[:, 2]
