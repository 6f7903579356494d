"""Fields of released models' config.json that a planner needs, and what their makers say they count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Released:
    """``billions`` of parameters as published or as the released weights count, without a vision part.

    Where only two or three digits are published, or a multi-token-prediction layer is among them, the
    tolerance is wider.
    """

    name: str
    billions: float
    experts: int
    top_k: int
    moe_layers: int
    config: dict[str, Any]
    tolerance: float = 0.005


def _config(
    model_type: str, hidden: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        **more,
    }


def _latent(nope: int = 128, rope: int = 64, value: int = 128, **more: Any) -> dict[str, Any]:
    return {
        "kv_lora_rank": 512,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        **more,
    }


DELTA_NET = {
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}

RELEASED = [
    Released(
        "qwen1.5-moe-a2.7b", 14.32, 60, 4, 24,
        _config("qwen2_moe", 2048, 24, 16, 16, 151936, num_experts=60, num_experts_per_tok=4,
                intermediate_size=5632, moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
                decoder_sparse_step=1, tie_word_embeddings=False, sliding_window=32768,
                use_sliding_window=False, max_window_layers=21),
    ),
    Released(
        "qwen2-57b-a14b", 57.41, 64, 8, 28,
        _config("qwen2_moe", 3584, 28, 28, 4, 151936, num_experts=64, num_experts_per_tok=8,
                intermediate_size=18944, moe_intermediate_size=2560, shared_expert_intermediate_size=20480,
                decoder_sparse_step=1, tie_word_embeddings=False),
    ),
    Released(
        "qwen3-235b-a22b", 235.09, 128, 8, 94,
        _config("qwen3_moe", 4096, 94, 64, 4, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8,
                intermediate_size=12288, moe_intermediate_size=1536, decoder_sparse_step=1,
                mlp_only_layers=[], tie_word_embeddings=False),
    ),
    Released(
        "qwen3-next-80b-a3b", 79.67, 512, 10, 48,
        _config("qwen3_next", 2048, 48, 16, 2, 151936, head_dim=256, num_experts=512, num_experts_per_tok=10,
                intermediate_size=5120, moe_intermediate_size=512, shared_expert_intermediate_size=512,
                full_attention_interval=4, linear_num_value_heads=32, mlp_only_layers=[],
                decoder_sparse_step=1, tie_word_embeddings=False, **DELTA_NET),
    ),
    Released(
        "qwen3.5-35b-a3b", 35, 256, 8, 40,
        {"model_type": "qwen3_5_moe", "tie_word_embeddings": False, "vision_config": {"depth": 27},
         "text_config": _config(
             "qwen3_5_moe_text", 2048, 40, 16, 2, 248320, head_dim=256, num_experts=256,
             num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512,
             layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 10, attn_output_gate=True,
             linear_num_value_heads=32, **DELTA_NET)},
        tolerance=0.01,
    ),
    Released(
        "deepseek-moe-16b", 16.38, 64, 6, 27,
        _config("deepseek", 2048, 28, 16, 16, 102400, n_routed_experts=64, n_shared_experts=2,
                num_experts_per_tok=6, intermediate_size=10944, moe_intermediate_size=1408,
                first_k_dense_replace=1, moe_layer_freq=1, tie_word_embeddings=False),
    ),
    Released(
        "deepseek-v2", 235.74, 160, 6, 59,
        _config("deepseek_v2", 5120, 60, 128, 128, 102400, n_routed_experts=160, n_shared_experts=2,
                num_experts_per_tok=6, intermediate_size=12288, moe_intermediate_size=1536,
                first_k_dense_replace=1, moe_layer_freq=1, tie_word_embeddings=False,
                **_latent(q_lora_rank=1536)),
    ),
    Released(
        "deepseek-v2-lite", 15.71, 64, 6, 26,
        _config("deepseek_v2", 2048, 27, 16, 16, 102400, n_routed_experts=64, n_shared_experts=2,
                num_experts_per_tok=6, intermediate_size=10944, moe_intermediate_size=1408,
                first_k_dense_replace=1, moe_layer_freq=1, tie_word_embeddings=False,
                **_latent(q_lora_rank=None)),
    ),
    Released(
        "deepseek-v3.2", 671.0, 256, 8, 58,
        _config("deepseek_v32", 7168, 61, 128, 128, 129280, n_routed_experts=256, n_shared_experts=1,
                num_experts_per_tok=8, intermediate_size=18432, moe_intermediate_size=2048,
                first_k_dense_replace=3, moe_layer_freq=1, index_n_heads=64, index_head_dim=128,
                index_topk=2048, tie_word_embeddings=False, **_latent(q_lora_rank=1536)),
        tolerance=0.005,
    ),
    Released(
        "dots.llm1", 142, 128, 6, 61,
        _config("dots1", 4096, 62, 32, 32, 152064, n_routed_experts=128, n_shared_experts=2,
                num_experts_per_tok=6, intermediate_size=10944, moe_intermediate_size=1408,
                first_k_dense_replace=1, moe_layer_freq=1, tie_word_embeddings=False),
        tolerance=0.01,
    ),
    Released(
        "hunyuan-large", 389.0, 16, 1, 64,
        _config("hunyuan", 6400, 64, 80, 8, 129024, num_experts=16, moe_topk=1, intermediate_size=18304,
                num_shared_expert=1, use_mixed_mlp_moe=True, use_qk_norm=True, tie_word_embeddings=True),
        tolerance=0.01,
    ),
    Released(
        "kimi-k2", 1026.4, 384, 8, 60,
        _config("kimi_k2", 7168, 61, 64, 64, 163840, n_routed_experts=384, n_shared_experts=1,
                num_experts_per_tok=8, intermediate_size=18432, moe_intermediate_size=2048,
                first_k_dense_replace=1, moe_layer_freq=1, tie_word_embeddings=False,
                **_latent(q_lora_rank=1536)),
    ),
    Released(
        "glm-4.5", 355, 160, 8, 89,
        _config("glm4_moe", 5120, 92, 96, 8, 151552, head_dim=128, n_routed_experts=160, n_shared_experts=1,
                num_experts_per_tok=8, intermediate_size=12288, moe_intermediate_size=1536,
                first_k_dense_replace=3, attention_bias=True, use_qk_norm=True, num_nextn_predict_layers=1,
                tie_word_embeddings=False),
        tolerance=0.01,
    ),
    Released(
        "glm-4.5-air", 106, 128, 8, 45,
        _config("glm4_moe", 4096, 46, 96, 8, 151552, head_dim=128, n_routed_experts=128, n_shared_experts=1,
                num_experts_per_tok=8, intermediate_size=10944, moe_intermediate_size=1408,
                first_k_dense_replace=1, attention_bias=True, use_qk_norm=False, num_nextn_predict_layers=1,
                tie_word_embeddings=False),
        tolerance=0.01,
    ),
    Released(
        "olmoe-1b-7b", 6.92, 64, 8, 16,
        _config("olmoe", 2048, 16, 16, 16, 50304, num_experts=64, num_experts_per_tok=8,
                intermediate_size=1024, tie_word_embeddings=False),
    ),
    Released(
        "phi-3.5-moe", 41.87, 16, 2, 32,
        _config("phimoe", 4096, 32, 32, 8, 32064, num_local_experts=16, num_experts_per_tok=2,
                intermediate_size=6400, attention_bias=True, lm_head_bias=True, sliding_window=131072,
                tie_word_embeddings=False),
    ),
    Released(
        "minimax-m1", 456.0, 32, 2, 80,
        _config("minimax_m1", 6144, 80, 64, 8, 200064, head_dim=128, num_local_experts=32,
                num_experts_per_tok=2, intermediate_size=9216, attn_type_list=([0] * 7 + [1]) * 10,
                shared_intermediate_size=0, tie_word_embeddings=False),
    ),
    Released(
        "minimax-m2", 230, 256, 8, 62,
        _config("minimax_m2", 3072, 62, 48, 8, 200064, head_dim=128, num_local_experts=256,
                num_experts_per_tok=8, intermediate_size=1536, attn_type_list=[1] * 62, use_qk_norm=True,
                shared_intermediate_size=0, num_mtp_modules=3, tie_word_embeddings=False),
        tolerance=0.01,
    ),
    Released(
        "llama-4-scout", 107.77, 16, 1, 48,
        {"model_type": "llama4", "tie_word_embeddings": False, "vision_config": {},
         "text_config": _config(
             "llama4_text", 5120, 48, 40, 8, 202048, head_dim=128, num_local_experts=16,
             num_experts_per_tok=1, intermediate_size=8192, intermediate_size_mlp=16384,
             interleave_moe_layer_step=1, attention_chunk_size=8192)},
    ),
    Released(
        "llama-4-maverick", 400, 128, 1, 24,
        {"model_type": "llama4",
         "text_config": _config(
             "llama4_text", 5120, 48, 40, 8, 202048, head_dim=128, num_local_experts=128,
             num_experts_per_tok=1, intermediate_size=8192, intermediate_size_mlp=16384,
             interleave_moe_layer_step=2, attention_chunk_size=8192, tie_word_embeddings=False)},
    ),
    Released(
        "dbrx", 131.6, 16, 4, 40,
        {"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "vocab_size": 100352,
         "max_seq_len": 32768, "tie_word_embeddings": False,
         "attn_config": {"model_type": "", "kv_n_heads": 8, "clip_qkv": 8},
         "ffn_config": {"model_type": "", "ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}},
    ),
    Released(
        "grok-1", 314.0, 8, 2, 64,
        _config("grok-1", 6144, 64, 48, 8, 131072, num_experts=8, num_experts_per_tok=2,
                intermediate_size=32768, max_position_embeddings=8192, tie_word_embeddings=True),
        tolerance=0.01,
    ),
    Released(
        "grok-2", 270, 8, 2, 64,
        _config("git", 8192, 64, 64, 8, 131072, head_dim=128, num_local_experts=8, num_experts_per_tok=2,
                intermediate_size=32768, moe_intermediate_size=16384, residual_moe=True,
                tie_word_embeddings=False),
    ),
    Released(
        "jamba-v0.1", 51.57, 16, 2, 16,
        _config("jamba", 4096, 32, 32, 8, 65536, num_experts=16, num_experts_per_tok=2,
                intermediate_size=14336, expert_layer_period=2, expert_layer_offset=1, attn_layer_period=8,
                attn_layer_offset=4, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=256,
                tie_word_embeddings=False, sliding_window=None),
    ),
    Released(
        "granite-3.0-3b-a800m", 3.30, 40, 8, 32,
        _config("granitemoe", 1536, 32, 24, 8, 49155, num_local_experts=40, num_experts_per_tok=8,
                intermediate_size=512, tie_word_embeddings=True),
    ),
    Released(
        "granite-4.0-h-small", 32, 72, 10, 40,
        _config("granitemoehybrid", 4096, 40, 32, 8, 100352, num_local_experts=72, num_experts_per_tok=10,
                intermediate_size=768, shared_intermediate_size=1536, mamba_n_heads=128, mamba_d_head=64,
                mamba_d_state=128, mamba_n_groups=1, mamba_d_conv=4, mamba_expand=2,
                layer_types=(["mamba"] * 9 + ["attention"]) * 4, tie_word_embeddings=True),
        tolerance=0.01,
    ),
    Released(
        "hunyuan-a13b", 80, 64, 8, 32,
        _config("hunyuan_v1_moe", 4096, 32, 32, 8, 128167, head_dim=128, num_experts=64, moe_topk=[8] * 32,
                moe_intermediate_size=[3072] * 32, num_shared_expert=[1] * 32, intermediate_size=3072,
                use_mixed_mlp_moe=True, use_qk_norm=True, tie_word_embeddings=True),
    ),
    Released(
        "ernie-4.5-21b-a3b", 21.8, 64, 6, 27,
        _config("ernie4_5_moe", 2560, 28, 20, 4, 103424, moe_num_experts=64, moe_k=6,
                moe_num_shared_experts=2, moe_intermediate_size=1536, intermediate_size=12288,
                moe_layer_start_index=1, moe_layer_end_index=-1, moe_layer_interval=1, use_bias=False,
                tie_word_embeddings=True),
    ),
    Released(
        "ernie-4.5-300b-a47b", 300, 64, 8, 51,
        _config("ernie4_5_moe", 8192, 54, 64, 8, 103424, moe_num_experts=64, moe_k=8,
                moe_intermediate_size=3584, intermediate_size=28672, moe_layer_start_index=3,
                moe_layer_end_index=53, moe_layer_interval=1, use_bias=False, tie_word_embeddings=False),
    ),
    Released(
        "nemotron-3-nano-30b-a3b", 31.6, 128, 6, 23,
        _config("nemotron_h", 2688, 52, 32, 2, 131072, head_dim=128, n_routed_experts=128,
                n_shared_experts=1, num_experts_per_tok=6, intermediate_size=1856, moe_intermediate_size=1856,
                moe_shared_expert_intermediate_size=3712, mamba_num_heads=64, mamba_head_dim=64, n_groups=8,
                ssm_state_size=128, conv_kernel=4, mlp_hidden_act="relu2",
                hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
                tie_word_embeddings=False),
    ),
    Released(
        "arctic", 480, 128, 2, 35,
        _config("arctic", 7168, 35, 56, 8, 32000, num_local_experts=128, num_experts_per_tok=2,
                intermediate_size=4864, moe_layer_frequency=1, parallel_attn_mlp_res=True,
                use_residual=True, tie_word_embeddings=False),
    ),
    Released(
        "longcat-flash", 560.0, 512, 12, 28,
        {"model_type": "longcat_flash", "hidden_size": 6144, "num_layers": 28, "num_attention_heads": 64,
         "vocab_size": 131072, "n_routed_experts": 512, "zero_expert_num": 256, "moe_topk": 12,
         "expert_ffn_hidden_size": 2048, "ffn_hidden_size": 12288, "tie_word_embeddings": False,
         **_latent(q_lora_rank=1536)},
        tolerance=0.01,
    ),
]  # fmt: skip
