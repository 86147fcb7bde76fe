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
}
