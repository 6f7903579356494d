"""Released models: parameter counts as their makers state them, and clear refusals of what is no such model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.errors import RuleError
from cost_model.hf_config import load_hf_config, read_hf_config
from cost_model.model_spec import ModelSpec
from tests.cost_model.released_models import RELEASED

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"


def example(name: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((EXAMPLES / f"{name}.json").read_text())
    return body


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt-oss-20b", 20.9),
        ("gpt-oss-120b", 116.8),
        ("qwen3-30b-a3b", 30.53),
        ("deepseek-v3", 671.0),
        ("mixtral-8x7b", 46.70),
    ],
)
def test_examples_reach_the_published_counts(name: str, billions: float) -> None:
    spec = load_hf_config(EXAMPLES / f"{name}.json")
    assert spec.name == name
    assert spec.total_params == pytest.approx(billions * 1e9, rel=0.002)


@pytest.mark.parametrize(
    ("name", "billions"), [("paper-120b", 118.4), ("paper-241b", 236.8), ("paper-667b", 659.5)]
)
def test_paper_models_reach_the_routed_counts(name: str, billions: float) -> None:
    spec = load_hf_config(EXAMPLES / f"{name}.json")
    assert spec.routed_params == pytest.approx(billions * 1e9, rel=0.002)
    assert spec.boundaries == 2 * spec.layers - 1


def test_gpt_oss_boundaries_are_the_papers_47() -> None:
    assert load_hf_config(EXAMPLES / "gpt-oss-20b.json").boundaries == 47


@pytest.mark.parametrize("model", RELEASED, ids=lambda model: model.name)
def test_other_released_families(model: Any) -> None:
    spec = read_hf_config(model.config, name=model.name)
    assert spec.total_params == pytest.approx(model.billions * 1e9, rel=model.tolerance)
    assert (spec.experts, spec.top_k, spec.moe_layers) == (model.experts, model.top_k, model.moe_layers)
    assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_original_gpt_oss_spelling_gives_the_same_model() -> None:
    released = example("gpt-oss-20b")
    original = {
        "num_hidden_layers": 24,
        "num_experts": 32,
        "experts_per_token": 4,
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "swiglu_limit": 7.0,
        "head_dim": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "initial_context_length": 4096,
        "attention_bias": True,
    }
    first, second = read_hf_config(released), read_hf_config(original)
    assert first.total_params == second.total_params
    assert first.attention == second.attention


def test_unknown_family_is_read_from_generic_fields() -> None:
    body = {**example("qwen3-30b-a3b"), "model_type": "novel_moe", "architectures": ["NovelForCausalLM"]}
    known, unknown = read_hf_config(example("qwen3-30b-a3b")), read_hf_config(body)
    assert unknown.total_params == pytest.approx(known.total_params, rel=1e-4)
    assert unknown.family == "novel_moe"


@pytest.mark.parametrize(
    ("gone", "named"),
    [
        (["num_experts_per_tok"], ["num_experts_per_tok"]),
        (["hidden_size", "vocab_size"], ["hidden_size", "vocab_size"]),
        (["num_hidden_layers"], ["num_hidden_layers"]),
        (["moe_intermediate_size", "intermediate_size"], ["moe_intermediate_size"]),
        (["num_attention_heads"], ["num_attention_heads"]),
    ],
)
def test_missing_fields_are_named_exactly(gone: list[str], named: list[str]) -> None:
    body = {**example("qwen3-30b-a3b"), "model_type": "novel_moe"}
    for field in gone:
        del body[field]
    with pytest.raises(RuleError) as caught:
        read_hf_config(body)
    stated = caught.value.rule.split("must give ")[1].split(", ")
    assert [name for name in stated if name in named] == stated
    assert all(name in caught.value.remedy for name in named)


@pytest.mark.parametrize(
    "broken",
    [
        {"hidden_size": "2048"},
        {"hidden_size": 0},
        {"hidden_size": -2048},
        {"hidden_size": True},
        {"hidden_size": 2048.5},
        {"hidden_size": [2048, 2048]},
        {"hidden_size": 10**30},
        {"vocab_size": None},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 10**9},
        {"num_experts": "many"},
        {"num_experts": -8},
        {"num_experts_per_tok": 129},
        {"num_experts_per_tok": 0},
        {"num_key_value_heads": 5},
        {"num_attention_heads": {}},
        {"moe_intermediate_size": False},
        {"mlp_only_layers": [99]},
        {"mlp_only_layers": "none"},
        {"decoder_sparse_step": 0},
        {"decoder_sparse_step": 1000},
        {"tie_word_embeddings": "no"},
        {"layer_types": ["full_attention"]},
        {"layer_types": ["telepathy"] * 48},
        {"max_position_embeddings": -1},
        {"model_type": 7},
    ],
    ids=lambda broken: json.dumps(broken)[:40],
)
def test_malformed_values_are_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(RuleError) as caught:
        read_hf_config({**example("qwen3-30b-a3b"), **broken})
    assert caught.value.rule
    assert caught.value.remedy


@pytest.mark.parametrize("body", [None, [], "config", 3, {}])
def test_what_is_no_config_is_refused(body: Any) -> None:
    with pytest.raises(RuleError):
        read_hf_config(body)


@pytest.mark.parametrize(
    "body",
    [
        {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 32000},
        {**example("qwen3-30b-a3b"), "num_experts": 0},
        {**example("qwen3-30b-a3b"), "num_experts": 1, "num_experts_per_tok": 1},
    ],
)
def test_dense_model_is_refused_clearly(body: dict[str, Any]) -> None:
    with pytest.raises(RuleError, match="only Mixture-of-Experts models"):
        read_hf_config(body)


def test_encoder_decoder_and_latent_experts_are_refused() -> None:
    with pytest.raises(RuleError, match="decoder-only"):
        read_hf_config({**example("qwen3-30b-a3b"), "is_encoder_decoder": True})
    with pytest.raises(RuleError, match="moe_latent_size"):
        read_hf_config({**example("qwen3-30b-a3b"), "moe_latent_size": 1024})


def test_different_widths_per_layer_are_refused_and_equal_ones_read() -> None:
    body = example("qwen3-30b-a3b")
    equal = read_hf_config({**body, "moe_intermediate_size": [768] * 48})
    assert equal.expert_intermediate == 768
    with pytest.raises(RuleError, match="the same in every layer"):
        read_hf_config({**body, "moe_intermediate_size": [768] * 47 + [1024]})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for content in (b"{", b"\xff\xfe\x00", b"[1]"):
        file = tmp_path / "config.json"
        file.write_bytes(content)
        with pytest.raises(RuleError):
            load_hf_config(file)
    with pytest.raises(RuleError, match="readable"):
        load_hf_config(tmp_path / "absent.json")
    (tmp_path / "config.json").write_text(json.dumps(example("mixtral-8x7b")))
    assert load_hf_config(tmp_path).name == tmp_path.name


JSON_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-2, 200), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_damage_to_a_config_is_a_rule_error_or_a_model(data: st.DataObject) -> None:
    body = example(data.draw(st.sampled_from(["deepseek-v3", "gpt-oss-20b", "qwen3-30b-a3b"])))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.sampled_from(sorted(body)))] = data.draw(JSON_VALUES)
    outcome: ModelSpec | RuleError
    try:
        outcome = read_hf_config(body)
    except RuleError as error:
        outcome = error
    if isinstance(outcome, RuleError):
        assert outcome.rule
        assert outcome.remedy
    else:
        assert outcome.total_params > 0
        assert 1 <= outcome.top_k <= outcome.experts


def test_stored_spec_refuses_what_is_no_model() -> None:
    good = load_hf_config(EXAMPLES / "mixtral-8x7b.json").to_json()
    for broken in (
        {"hidden": 0},
        {"hidden": "4096"},
        {"layers": True},
        {"top_k": 9},
        {"attention": None},
        {"attention": {**good["attention"], "kv_heads": 5}},
        {"attention": {**good["attention"], "kind": "mqa"}},
        {"surprise": 1},
        {"mlp_matrices": 4},
        {"mixer_layers": 33},
        {"name": 5},
        {"expert_bias": "yes"},
    ):
        with pytest.raises(RuleError):
            ModelSpec.from_json({**good, **broken})
    with pytest.raises(RuleError, match="required field"):
        ModelSpec.from_json({key: value for key, value in good.items() if key != "experts"})
