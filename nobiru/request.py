"""The values that describe one piece of embedding work, from the caller's options to what a rank is given and gives
back. Those of generation are in `nobiru.generation`.

Plain data: no torch, no I/O. Shape legend: N sequences in a request, T tokens in all of them, D embedding size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]
Vectors = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingParams:
    """What a caller may ask of an embedding.

    `dimensions` keeps the first k values and normalizes again (`encode(truncate_dim=k, normalize_embeddings=True)`).
    `normalize` None follows the model's modules, True normalizes always, False gives the vectors before the model's
    own Normalize module. `prompt` (a text put in front, "" for none) beats `prompt_name` (a key of the model's
    prompts), which beats the model's default prompt. `truncate_prompt_tokens` None follows the server or `LLM`
    default, -1 cuts at the model's limit, k > 0 cuts to k tokens, special tokens included. `truncation_side` is "right"
    or "left", None as the model's tokenizer says.
    Lower `priority` values are served first.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    prompt: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    priority: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedPrompts:
    """The prompts of one request as token ids, special tokens included.

    `token_ids` [T] holds all sequences one after another, `lengths` [N] their lengths, `truncated` [N] which were cut.
    `num_skipped_tokens` is how many leading tokens of each sequence pooling leaves out (`include_prompt: false`).
    """

    token_ids: TokenIds
    lengths: TokenIds
    truncated: NDArray[np.bool_]
    num_skipped_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.size)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingRequest:
    """One request as the engine takes it: N sequences that share options and priority."""

    request_id: str
    prompts: EncodedPrompts
    dimensions: int | None = None
    normalize: bool | None = None
    priority: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceInput:
    """One sequence as a runner takes it: `token_ids` [t], special tokens included."""

    token_ids: TokenIds
    dimensions: int | None = None
    normalize: bool | None = None
    num_skipped_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingOutput:
    """`embedding` [D], always float32."""

    embedding: Vectors


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingRequestOutput:
    """What `LLM.embed` returns for one prompt."""

    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    truncated: bool

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)
