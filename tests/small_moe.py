"""Small random language models with experts, for tests; what differs within a family is here, sizes are not."""

from __future__ import annotations

from typing import Any

from tests.small_architectures import MAX_CONTEXT, Encoder, chat_bpe, llama_bpe


def _moe(family: str, changes: dict[str, Any], **options: Any) -> Encoder:
    common = {"max_position_embeddings": MAX_CONTEXT, "num_key_value_heads": 2, "tie_word_embeddings": False}
    names = {"config": f"{family}Config", "model": f"{family}ForCausalLM", "tokenizer": llama_bpe}
    return Encoder(**(names | options), changes=common | changes)


_MANY = {"num_experts": 8, "moe_intermediate_size": 40}
_WINDOW = {"use_sliding_window": True, "sliding_window": 20}

MIXTRAL = _moe("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None})
QWEN3_MOE = _moe(
    "Qwen3Moe", _MANY | {"head_dim": 24, "num_experts_per_tok": 3, "norm_topk_prob": True}, tokenizer=chat_bpe
)
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 18,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
DEEPSEEK_V3 = _moe("DeepseekV3", _LATENT)

MOE_ARCHITECTURES: dict[str, Encoder] = {
    "mixtral": MIXTRAL,
    "mixtral-window": _moe("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 20}),
    "qwen3-moe": QWEN3_MOE,
    # One layer of three without experts, and weights that do not add up to one.
    "qwen3-moe-sparse": _moe(
        "Qwen3Moe",
        _MANY | _WINDOW | {"num_experts_per_tok": 2, "mlp_only_layers": [0], "attention_bias": True, "head_dim": 16},
    ),
    # Experts in the second layer of three; a window in the first.
    "qwen2-moe": _moe(
        "Qwen2Moe",
        _MANY
        | _WINDOW
        | {"num_experts_per_tok": 2, "shared_expert_intermediate_size": 56, "decoder_sparse_step": 2}
        | {"max_window_layers": 2},
    ),
    "qwen2-moe-normalized": _moe(
        "Qwen2Moe",
        _MANY | {"num_experts_per_tok": 4, "shared_expert_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "olmoe": _moe("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 40}),
    "olmoe-clipped": _moe(
        "Olmoe",
        {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 0.8, "norm_topk_prob": True, "attention_bias": True},
    ),
    "deepseek-v3": DEEPSEEK_V3,
    # Queries that are not compressed, pairs of values apart, no groups, biases, and positions stretched.
    "deepseek-v3-variant": _moe(
        "DeepseekV3",
        _LATENT
        | {"q_lora_rank": None, "rope_interleave": False, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}
        | {"attention_bias": True, "n_shared_experts": 2, "first_k_dense_replace": 0, "rope_parameters": _YARN},
    ),
    "deepseek-v2": _moe(
        "DeepseekV2",
        _LATENT | {"n_group": None, "topk_group": None, "topk_method": "greedy", "first_k_dense_replace": 1},
    ),
    "deepseek-v2-grouped": _moe(
        "DeepseekV2",
        _LATENT
        | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0, "q_lora_rank": None}
        | {"attention_bias": True, "mlp_bias": True, "rope_parameters": _YARN, "first_k_dense_replace": 0},
    ),
}
