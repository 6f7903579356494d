"""Parameters and widths of layers that mix tokens by a recurrence: linear attention and state spaces."""

from __future__ import annotations

from dataclasses import dataclass

from cost_model.errors import RuleError
from cost_model.hf_fields import Fields


@dataclass(frozen=True, slots=True)
class Mixer:
    """``params`` of one mixer with its two norms; ``width`` scalars per token that its projections yield."""

    params: int
    width: int


def read_mixer(fields: Fields, hidden: int, heads: int, head_dim: int) -> Mixer:
    """The recurrent mixer a config describes.

    Raises:
        RuleError: no known kind of mixer is described, with the fields that would describe one.
    """
    if fields.has("linear_num_value_heads"):
        return _gated_delta(fields, hidden)
    if fields.has("mamba_n_heads") or fields.has("mamba_num_heads"):
        return _mamba2(fields, hidden)
    if fields.has("mamba_d_state") and fields.has("mamba_expand"):
        return _mamba1(fields, hidden)
    if fields.has("attn_type_list"):
        return _lightning(hidden, heads * head_dim)
    raise RuleError(
        rule="a recurrent layer needs its own widths",
        value=sorted(name for name in fields.mapping if "mamba" in name or "linear" in name),
        remedy="Give linear_num_value_heads and its fellows, mamba_n_heads, or mamba_d_state and mamba_expand.",
    )


def _gated_delta(fields: Fields, hidden: int) -> Mixer:
    key_heads, value_heads = fields.count("linear_num_key_heads"), fields.count("linear_num_value_heads")
    key = key_heads * fields.count("linear_key_head_dim")
    value_head_dim = fields.count("linear_value_head_dim")
    value = value_heads * value_head_dim
    kernel = fields.optional("linear_conv_kernel_dim", default=4, least=1)
    width = 2 * key + 2 * value + 2 * value_heads
    convolution = (2 * key + value) * kernel
    params = hidden * width + convolution + 2 * value_heads + value_head_dim + value * hidden + 2 * hidden
    return Mixer(params, width)


def _mamba2(fields: Fields, hidden: int) -> Mixer:
    heads = fields.optional("mamba_n_heads", "mamba_num_heads", least=1)
    head_dim = fields.optional("mamba_d_head", "mamba_head_dim", default=64, least=1)
    inner = heads * head_dim
    state = fields.optional("mamba_d_state", "ssm_state_size", "mamba_state_dim", default=128, least=1)
    groups = fields.optional("mamba_n_groups", "n_groups", default=1, least=1)
    kernel = fields.optional("mamba_d_conv", "conv_kernel", default=4, least=1)
    convolved = inner + 2 * groups * state
    width = inner + convolved + heads
    params = hidden * width + convolved * (kernel + 1) + 3 * heads + inner + inner * hidden + 2 * hidden
    return Mixer(params, width)


def _mamba1(fields: Fields, hidden: int) -> Mixer:
    inner = fields.count("mamba_expand") * hidden
    state = fields.count("mamba_d_state")
    rank = fields.optional("mamba_dt_rank", default=-(-hidden // 16), least=1)
    kernel = fields.optional("mamba_d_conv", default=4, least=1)
    selection = inner * (rank + 2 * state) + rank * inner + inner + rank + 2 * state
    params = 2 * hidden * inner + inner * (kernel + 1) + selection + inner * state + inner + inner * hidden
    return Mixer(params + 2 * hidden, 2 * inner)


def _lightning(hidden: int, inner: int) -> Mixer:
    # q, k, v in one matrix, an output gate and an output projection of the same width.
    return Mixer(hidden * 3 * inner + hidden * inner + inner * hidden + inner + 2 * hidden, 4 * inner)
