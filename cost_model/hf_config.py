"""ModelSpec from a Hugging Face ``config.json``.

Families are told apart by ``model_type`` only where fields do not say enough (biases that are always there,
blocks that run beside the experts). Any other family is read from its generic fields, see
``hf_fields.ALIASES``; if those do not suffice it is refused with the names of what is missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cost_model.errors import RuleError
from cost_model.hf_fields import ALIASES, LIMITS, Fields
from cost_model.hf_layers import moe_layer_count, token_mixing
from cost_model.hf_mixers import Mixer, read_mixer
from cost_model.model_spec import AttentionSpec, ModelSpec
from cost_model.text_file import read_text

NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where multimodal models keep the decoder."""

REQUIRED = ("hidden", "layers", "vocab", "heads", "experts", "top_k", "expert_intermediate")

INTERMEDIATE_IS_EXPERT = (
    "jamba",
    "arctic",
    "mixtral",
    "gpt_oss",
    "olmoe",
    "phimoe",
    "granitemoe",
    "llama4_text",
)
QKV_BIAS = ("qwen2_moe",)
QK_NORM = (
    "qwen3_moe",
    "qwen3_next",
    "olmoe",
    "flex_olmo",
    "qwen3_vl_moe_text",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
)
PATTERN_BLOCKS = {"M": "mamba", "*": "attention", "-": "dense", "E": "moe"}


def load_hf_config(path: str | Path) -> ModelSpec:
    """Read a ``config.json``, or the one in a model's folder.

    Raises:
        RuleError: no such file, not JSON, or not a model that can be planned.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        text = read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise RuleError(
            rule="the model's config.json must be a readable text file",
            value=str(path),
            remedy=f"Give the path of a config.json ({type(error).__name__}).",
        ) from None
    try:
        mapping = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RuleError(
            rule="config.json must be valid JSON", value=str(path), remedy=f"Correct it: {error}."
        ) from None
    name = file.parent.name if file.name == "config.json" else file.stem
    return read_hf_config(mapping, name=name or None)


def read_hf_config(mapping: Mapping[str, Any], *, name: str | None = None) -> ModelSpec:
    """The shape of the model a ``config.json`` describes.

    Args:
        mapping: the parsed file.
        name: what to call the model; default: its ``_name_or_path`` or ``model_type``.

    Raises:
        RuleError: a field is missing or malformed, the model has no experts, or it is no decoder.
    """
    if not isinstance(mapping, Mapping):
        raise RuleError(
            rule="config.json must hold one JSON object",
            value=type(mapping).__name__,
            remedy="Give the mapping of a Hugging Face config.json.",
        )
    fields = _decoder(mapping)
    family = _family(fields)
    if family.startswith("nemotron") and fields.has("hybrid_override_pattern"):
        return _named(_pattern_model(fields, family), mapping, name)
    if family.startswith("longcat"):
        return _named(_shortcut_model(fields, family), mapping, name)
    values = _required(fields, family)
    hidden, layers = values["hidden"], values["layers"]
    sliding, recurrent = token_mixing(fields, layers)
    attention = _attention(fields, family, hidden, values["heads"], sliding=sliding)
    mixer = read_mixer(fields, hidden, attention.heads, attention.head_dim) if recurrent else Mixer(0, 0)
    moe_layers = moe_layer_count(fields, layers)
    dense_layers = layers - moe_layers
    spec = ModelSpec(
        name="",
        family=family,
        hidden=hidden,
        layers=layers,
        vocab=values["vocab"],
        attention=attention,
        experts=values["experts"],
        top_k=values["top_k"],
        expert_intermediate=values["expert_intermediate"],
        moe_layers=moe_layers,
        dense_layers=dense_layers,
        dense_intermediate=_dense_intermediate(fields, dense_layers),
        expert_bias=_is_gpt_oss(fields, family),
        router_bias=_is_gpt_oss(fields, family),
        mixer_layers=recurrent,
        mixer_params=mixer.params,
        mixer_width=mixer.width,
        **_common(fields),
        **_shared(fields, family, values["expert_intermediate"]),
    )
    return _named(spec, mapping, name)


def _decoder(mapping: Mapping[str, Any]) -> Fields:
    merged = dict(mapping)
    for _ in range(len(NESTED)):  # one inside another happens, a loop does not
        inner = next((merged[key] for key in NESTED if isinstance(merged.get(key), Mapping)), None)
        if inner is None:
            break
        merged = {"tie_word_embeddings": merged.get("tie_word_embeddings"), **inner}
    for key in ("attn_config", "ffn_config"):
        part = merged.get(key)
        if isinstance(part, Mapping):
            merged = {**{k: v for k, v in part.items() if k != "model_type"}, **merged}
    if merged.get("is_encoder_decoder") is True:
        raise RuleError(
            rule="only decoder-only models can be planned",
            value=merged.get("model_type"),
            remedy="Encoder-decoder models have another step; there is no plan for them.",
        )
    return Fields(merged)


def _family(fields: Fields) -> str:
    family = fields.mapping.get("model_type", "unknown")
    if not isinstance(family, str):
        raise RuleError(rule="model_type must be a string", value=family, remedy="Correct or remove it.")
    return family if family != "unknown" or not fields.has("swiglu_limit") else "gpt_oss"


def _is_gpt_oss(fields: Fields, family: str) -> bool:
    return family == "gpt_oss" or (family == "unknown" and fields.has("swiglu_limit"))


def _required(fields: Fields, family: str) -> dict[str, int]:
    _refuse_dense(fields)
    if fields.has("moe_latent_size"):
        raise RuleError(
            rule="routed experts must work on the model's own width, not on a latent one (moe_latent_size)",
            value=fields.mapping["moe_latent_size"],
            remedy="Dispatch of latent rows has no memory formula here.",
        )
    values = {meaning: fields.meaning(meaning) for meaning in REQUIRED}
    if family in INTERMEDIATE_IS_EXPERT and fields.has("intermediate_size"):
        values["expert_intermediate"] = fields.count("intermediate_size", most=LIMITS["expert_intermediate"])
    missing = [meaning for meaning, value in values.items() if value is None]
    if missing:
        wanted = "; ".join(f"{meaning} ({' or '.join(ALIASES[meaning][:3])})" for meaning in missing)
        raise RuleError(
            rule=f"a config.json of family {family!r} must give {', '.join(ALIASES[m][0] for m in missing)}",
            value=sorted(str(key) for key in fields.mapping),
            remedy=f"Add the missing fields: {wanted}.",
        )
    found = {meaning: value for meaning, value in values.items() if value is not None}
    if found["top_k"] > found["experts"]:
        raise RuleError(
            rule=f"{fields.named('top_k')} must be at most the number of experts ({found['experts']})",
            value=found["top_k"],
            remedy="Correct either value.",
        )
    return found


def _refuse_dense(fields: Fields) -> None:
    experts = fields.named("experts")
    written = fields.mapping[experts] if experts is not None else None
    zero = written in (0, 1, [0], [1]) and not isinstance(written, bool)  # one expert is a dense block
    if zero or (experts is None and fields.named("top_k") is None):
        if experts is None and fields.named("hidden") is None and fields.named("layers") is None:
            return  # hardly a model at all: the list of missing fields says more
        raise RuleError(
            rule="only Mixture-of-Experts models can be planned: config.json must give num_experts",
            value=fields.mapping.get("model_type", "no experts"),
            remedy=f"This is a dense model, or its experts go by another name than {', '.join(ALIASES['experts'])}.",
        )


def _common(fields: Fields) -> dict[str, Any]:
    return {
        "tied_embeddings": fields.flag("tie_word_embeddings"),
        "max_context": fields.meaning("context"),
    }


def _attention(fields: Fields, family: str, hidden: int, heads: int, *, sliding: int = 0) -> AttentionSpec:
    window = fields.optional("sliding_window", "attention_chunk_size", least=1) if sliding else None
    bias = fields.flag("attention_bias", "use_bias", "use_qkv_bias", default=family in QKV_BIAS)
    if fields.has("kv_lora_rank"):
        return _latent_attention(fields, hidden, heads, bias=bias)
    kv_heads = fields.meaning("kv_heads") or heads
    if heads % kv_heads:
        raise RuleError(
            rule=f"{fields.named('kv_heads')} must divide the attention heads ({heads})",
            value=kv_heads,
            remedy="Correct either value.",
        )
    head_dim = fields.meaning("head_dim")
    if head_dim is None:
        if hidden % heads:
            raise RuleError(
                rule=f"without head_dim the attention heads ({heads}) must divide hidden_size",
                value=hidden,
                remedy="Give head_dim, or correct either value.",
            )
        head_dim = hidden // heads
    return AttentionSpec(
        kind="gqa",
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=fields.optional("v_head_dim", default=head_dim, least=1),
        bias=bias,
        qk_norm=fields.flag("use_qk_norm", "qk_norm", default=family in QK_NORM),
        sinks=_is_gpt_oss(fields, family),
        sliding_window=window,
        sliding_layers=sliding,
        output_gate=fields.flag("attn_output_gate", default=family.startswith(("qwen3_next", "qwen3_5"))),
    )


def _latent_attention(fields: Fields, hidden: int, heads: int, *, bias: bool) -> AttentionSpec:
    needed = [n for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim") if not fields.has(n)]
    if needed:
        raise RuleError(
            rule=f"latent attention (kv_lora_rank) must give {', '.join(needed)}",
            value=sorted(str(key) for key in fields.mapping),
            remedy=f"Add the missing fields: {', '.join(needed)}.",
        )
    rope = fields.count("qk_rope_head_dim", most=LIMITS["head_dim"])
    query_rank = fields.optional("q_lora_rank")
    indexer = 0
    if fields.has("index_n_heads"):
        index_heads, index_dim = fields.count("index_n_heads"), fields.count("index_head_dim")
        indexer = (query_rank or hidden) * index_heads * index_dim + hidden * (index_dim + index_heads)
        indexer += 2 * index_dim
    return AttentionSpec(
        kind="mla",
        heads=heads,
        kv_heads=heads,
        head_dim=fields.count("qk_nope_head_dim", most=LIMITS["head_dim"]) + rope,
        v_head_dim=fields.count("v_head_dim", most=LIMITS["head_dim"]),
        q_lora_rank=query_rank or None,
        kv_lora_rank=fields.count("kv_lora_rank"),
        rope_head_dim=rope,
        bias=bias,
        extra_params=indexer,
    )


def _dense_intermediate(fields: Fields, dense_layers: int) -> int:
    if not dense_layers:
        return 0
    name = fields.named("dense_intermediate")
    if name is None:
        raise RuleError(
            rule=f"{dense_layers} layers are dense, so config.json must give intermediate_size",
            value=sorted(str(key) for key in fields.mapping),
            remedy="Add intermediate_size, the width of the dense layers.",
        )
    return fields.count(name, most=LIMITS["dense_intermediate"])


def _shared(fields: Fields, family: str, expert_intermediate: int) -> dict[str, Any]:
    """Blocks that every token passes beside the routed experts."""
    if family.startswith("llama4"):
        return {"shared_experts": 1, "shared_intermediate": expert_intermediate}
    if family == "arctic":  # a residual block as wide as the model
        return {"shared_experts": 1, "shared_intermediate": fields.count("hidden_size")}
    if fields.flag("residual_moe"):
        return {"shared_experts": 1, "shared_intermediate": fields.count("intermediate_size")}
    width = fields.optional("shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim")
    if width:
        gated = family.startswith(("qwen2_moe", "qwen3_next", "qwen3_5"))
        return {"shared_experts": 1, "shared_intermediate": width, "shared_gate": gated}
    count = fields.optional(
        "n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"
    )
    if not count:
        return {}
    width = fields.optional("moe_shared_expert_intermediate_size", default=expert_intermediate, least=1)
    return {"shared_experts": count, "shared_intermediate": width}


def _pattern_model(fields: Fields, family: str) -> ModelSpec:
    """A family whose layers are single blocks, written as a string: M state space, * attention, E experts."""
    pattern = fields.text("hybrid_override_pattern", "")
    unknown = sorted(set(pattern) - set(PATTERN_BLOCKS))
    if unknown:
        raise RuleError(
            rule=f"hybrid_override_pattern knows {' '.join(PATTERN_BLOCKS)}",
            value=unknown,
            remedy="Correct the pattern.",
        )
    if "E" not in pattern:
        raise RuleError(
            rule="only Mixture-of-Experts models can be planned: the layer pattern must hold an E",
            value=pattern,
            remedy="This is a dense hybrid.",
        )
    values = _required(fields, family)
    attention = _attention(fields, family, values["hidden"], values["heads"])
    recurrent = pattern.count("M")
    hidden = values["hidden"]
    mixer = read_mixer(fields, hidden, attention.heads, attention.head_dim) if recurrent else Mixer(0, 0)
    dense = pattern.count("-")
    return ModelSpec(
        name="",
        family=family,
        hidden=hidden,
        layers=recurrent + pattern.count("*"),
        vocab=values["vocab"],
        attention=attention,
        experts=values["experts"],
        top_k=values["top_k"],
        expert_intermediate=values["expert_intermediate"],
        moe_layers=pattern.count("E"),
        dense_layers=dense,
        dense_intermediate=_dense_intermediate(fields, dense),
        mlp_matrices=2,  # squared ReLU, nothing gates
        mixer_layers=recurrent,
        mixer_params=mixer.params,
        mixer_width=mixer.width,
        **_common(fields),
        **_shared(fields, family, values["expert_intermediate"]),
    )


def _shortcut_model(fields: Fields, family: str) -> ModelSpec:
    """A family whose layers hold two attentions and two dense blocks beside one set of experts."""
    values = _required(fields, family)
    layers = values["layers"]
    return ModelSpec(
        name="",
        family=family,
        hidden=values["hidden"],
        layers=2 * layers,
        vocab=values["vocab"],
        attention=_attention(fields, family, values["hidden"], values["heads"]),
        experts=values["experts"],
        top_k=values["top_k"],
        expert_intermediate=values["expert_intermediate"],
        moe_layers=layers,
        dense_layers=2 * layers,
        dense_intermediate=_dense_intermediate(fields, layers),
        **_common(fields),
    )


def _named(spec: ModelSpec, mapping: Mapping[str, Any], name: str | None) -> ModelSpec:
    fields = Fields(mapping)
    chosen = name or fields.text("_name_or_path", fields.text("name", spec.family))
    named = replace(spec, name=chosen)
    named.check()
    return named
