"""What a model folder says about itself, as plain values.

Owns the vocabulary in which the other packages speak of a folder. Knows nothing of torch, and does not read files:
`nobiru.folder.read` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

# In the order in which Sentence Transformers concatenates the results of several legacy flags.
POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
SIMILARITY_NAMES = ("cosine", "dot", "euclidean", "manhattan")


@dataclass(frozen=True, kw_only=True)
class PoolingSpec:
    """Token vectors [t, H] → one vector [len(modes) * H]; `modes` in the order of concatenation."""

    modes: tuple[str, ...] = ("mean",)
    include_prompt: bool = True


@dataclass(frozen=True, kw_only=True)
class DenseSpec:
    """`activation(x @ W.T + b)`, optionally plus x (projected when sizes differ); weights in `path`."""

    path: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str  # dotted class name in torch.nn, "torch.nn.modules.linear.Identity" for none
    use_residual: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerNormSpec:
    """Layer normalization of the sentence vector; weights in `path`."""

    path: Path
    dimension: int


@dataclass(frozen=True, kw_only=True)
class NormalizeSpec:
    """L2 normalization."""


ModuleSpec = PoolingSpec | DenseSpec | LayerNormSpec | NormalizeSpec
Task = Literal["embed", "generate"]


@dataclass(frozen=True, kw_only=True)
class GenerationSpec:
    """What a language model's folder says about generating text.

    `eos_token_ids` end a text. `sampling_defaults` are the fields of `SamplingParams` that `generation_config.json`
    sets (temperature, top_k, top_p, min_p, repetition_penalty). `chat_template` is Jinja source; `special_tokens` are
    the texts of bos_token, eos_token, … that it may use.
    """

    eos_token_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A Sentence Transformers or `save_pretrained` folder.

    `task` is what the model is for; `generation` is set for language models, which have no modules and an
    `embedding_dim` of 0. `is_causal` says that a token attends to those before it only, so the model runs over a KV
    cache: language models, and embedding models made from them.
    `modules` are those behind the Transformer, in order, the first a `PoolingSpec`. `max_model_len` is the limit in
    tokens, special tokens included, that Sentence Transformers would cut texts to. `embedding_dim` is D after all
    modules. `lower_case` asks for lower-casing texts before tokenization.
    """

    path: Path
    transformer_path: Path
    config: Mapping[str, Any]
    model_type: str
    modules: tuple[ModuleSpec, ...]
    max_model_len: int
    hidden_size: int
    embedding_dim: int
    vocab_size: int
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    similarity: str = "cosine"
    task: Task = "embed"
    is_causal: bool = False
    generation: GenerationSpec | None = None

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def pooling(self) -> PoolingSpec:
        """How token vectors become one; language models have no such module, and their last token counts."""
        if not self.modules:
            return PoolingSpec(modes=("lasttoken",))
        first = self.modules[0]
        assert isinstance(first, PoolingSpec), "folder.read puts the pooling first"
        return first
