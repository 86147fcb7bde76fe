"""What the native decoder families share: token vectors, a stack of Llama's layers, a norm, and the head.

Owns the configuration of such a model, the assembly of its layers from a file's tensors, and the forward pass over the
KV cache.

Shape legend: T tokens, B sequences, C hidden size, V vocabulary, H query heads, K key heads, D values a head, I input
values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nobiru.folder.rope import RopeSpec, read_rope
from nobiru.folder.spec import ModelFolder
from nobiru.layers.activation import Activation
from nobiru.layers.decoder_block import DecoderBlock, FeedForward, GatedMlp, SelfAttention
from nobiru.layers.linear import Linear, make_linear
from nobiru.layers.rms_norm import HeadNorm, ProjectionNorm, RmsNorm
from nobiru.layers.rotary import KINDS, Rotary, side_by_side
from nobiru.models.config import DECODER_LIMITS, ConfigFields
from nobiru.models.moe import MoeConfig, MoeParts, SlotChoice, load_moe
from nobiru.models.weights import ModelWeights, Precision
from nobiru.ops.paged_layout import LayerCache, PagedLayout
from nobiru.ops.scratch import Scratch

# What is normalized of queries and keys: each head, or all heads together.
QkNorm = Literal["head", "projection"]

_TABLE = "embed_tokens.weight"
_HEAD = "lm_head.weight"
# What a kind of scaling cannot do without.
_NEEDED_NUMBERS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "factor"),
    "yarn": ("factor",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Sizes of a stack of `DecoderBlock`s, and which of their parts there are. `windows` has one entry a layer."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    activation: Activation
    norm_eps: float
    rope: RopeSpec
    windows: tuple[int | None, ...]
    is_tied: bool
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QkNorm | None = None
    qkv_clip: float | None = None


class Decoder:
    """`forward` maps a step's tokens to hidden states, `logits` some of those to scores for the next token.

    `moe` are its MoE layers, if it has any.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        words_VC: Tensor,
        rotary: Rotary,
        blocks: list[DecoderBlock],
        norm: RmsNorm,
        head: Linear | None,
        moe: MoeParts | None = None,
    ) -> None:
        self.num_layers = config.num_layers
        self.num_kv_heads = config.num_kv_heads
        self.head_size = config.head_size
        self.vocab_size = config.vocab_size
        self.dtype = norm.weight_C.dtype
        self._words_VC = words_VC
        self._rotary = rotary
        self._blocks = blocks
        self._norm = norm
        self._head = head
        self.moe = moe

    @property
    def is_reentrant(self) -> bool:
        return self.moe is None or self.moe.is_reentrant

    def forward(
        self, token_ids_T: Tensor, layout: PagedLayout, cache: Sequence[LayerCache], scratch: Scratch | None = None
    ) -> Tensor:
        """Hidden states [T, C] behind the last norm, in memory of their own; keys and values go into the cache."""
        hidden_TC = F.embedding(token_ids_T, self._words_VC).to(self.dtype)
        turns_T1P = self._rotary.turns_at(layout.positions_T)
        for block, layer_cache in zip(self._blocks, cache, strict=True):
            block(hidden_TC, turns_T1P, layout, layer_cache, scratch)
        return self._norm(hidden_TC)

    def logits(self, hidden_BC: Tensor) -> Tensor:
        """Hidden states [B, C] → scores [B, V] in float32."""
        assert self._head is not None, "an embedding model has no head"
        return self._head(hidden_BC).float()


def read_decoder(
    folder: ModelFolder,
    *,
    windows: Sequence[int | None] | None = None,
    default_head_size: int | None = None,
    default_norm_eps: float = 1e-6,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: QkNorm | None = None,
    qkv_clip: float | None = None,
) -> DecoderConfig:
    """The sizes in `config.json`, by the names that all these families use; the rest is the family's."""
    fields = ConfigFields(folder, DECODER_LIMITS)
    hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    num_layers, num_kv_heads = fields.size("num_hidden_layers"), fields.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        fields.refuse("num_key_value_heads", f"it must divide num_attention_heads, {num_heads}")
    head_size = fields.size("head_dim", default_head_size or hidden_size // num_heads)
    if head_size % 2:
        fields.refuse("head_dim", "rotary positions need an even number")
    windows = windows or (None,) * num_layers
    if len(windows) != num_layers:
        fields.refuse("layer_types", f"one for each of the {num_layers} layers is expected")
    return DecoderConfig(
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        vocab_size=fields.size("vocab_size"),
        activation=fields.activation("hidden_act", "silu"),
        norm_eps=fields.number("rms_norm_eps", default_norm_eps),
        rope=_read_rope(folder, fields, head_size),
        # A window that no text outgrows need not be looked at.
        windows=tuple(None if window is None or window >= folder.max_model_len else window for window in windows),
        is_tied=fields.flag("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        qkv_clip=qkv_clip,
    )


def _read_rope(folder: ModelFolder, fields: ConfigFields, head_size: int) -> RopeSpec:
    positions = folder.config.get("max_position_embeddings")
    rope = read_rope(folder.config, fields.file, max_position_embeddings=positions)
    name = "rope_parameters" if folder.config.get("rope_parameters") else "rope_scaling"
    if rope.kind not in KINDS:
        fields.refuse(name, f"the kind {rope.kind!r} is not served; known are {', '.join(KINDS)}")
    if rope.partial != 1.0:
        fields.refuse(name, "all values of a head are turned in this architecture")
    needed = _NEEDED_NUMBERS.get(rope.kind, ())
    if missing := [number for number in needed if number not in rope.numbers]:
        fields.refuse(name, f"the kind {rope.kind!r} needs {' and '.join(missing)}")
    if rope.kind == "longrope":
        stretch = rope.numbers["short_factor"]
        if not isinstance(stretch, list) or len(stretch) != head_size // 2 or not all(_is_positive(x) for x in stretch):
            fields.refuse(name, f"'short_factor' must be a list of {head_size // 2} numbers above 0")
    return rope


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def load_decoder(
    folder: ModelFolder,
    config: DecoderConfig,
    precision: Precision,
    device: torch.device,
    *,
    moe: MoeConfig | None = None,
    slots_LS: SlotChoice | None = None,
) -> Decoder:
    """The decoder of a folder, with its head if it is a language model, and with experts in the layers of `moe`."""
    weights = ModelWeights(
        folder.transformer_path,
        anchor=_TABLE,
        roots=("embed_tokens", "layers", "norm"),
        heads=("lm_head",) if folder.task == "generate" else (),
        precision=precision,
        device=device,
    )
    words_VC, head = _read_ends(weights, config, folder)
    parts = None if moe is None else load_moe(weights, moe, precision, device, slots_LS)
    blocks = [
        _read_block(weights, layer, config, None if parts is None else parts.feed_forward(layer))
        for layer in range(config.num_layers)
    ]
    norm = read_norm(weights, "norm", config)
    weights.finish()
    if parts is not None:
        parts.fill()
    rotary = Rotary(config.rope, head_size=config.head_size, num_positions=folder.max_model_len, device=device)
    return Decoder(config, words_VC=words_VC, rotary=rotary, blocks=blocks, norm=norm, head=head, moe=parts)


def _read_ends(weights: ModelWeights, config: DecoderConfig, folder: ModelFolder) -> tuple[Tensor, Linear | None]:
    """The table of token vectors, and the head; one tensor for both where they are tied.

    As `transformers` does, a folder that says they are, but has two different ones, is taken to have two.
    """
    shape = config.vocab_size, config.hidden_size
    if folder.task != "generate":
        return weights.take_table(_TABLE, *shape), None
    if not weights.has(_HEAD):
        words_VC = weights.take(_TABLE, *shape)
        return words_VC, make_linear(words_VC, None, natively=True)
    head_VC = weights.take(_HEAD, *shape)
    words_VC = weights.take_table(_TABLE, *shape)
    if config.is_tied and torch.equal(words_VC.to(head_VC.dtype), head_VC):
        words_VC = head_VC
    return words_VC, make_linear(head_VC, None, natively=True)


def _read_block(weights: ModelWeights, layer: int, config: DecoderConfig, mlp: FeedForward | None) -> DecoderBlock:
    """The layer; its feed-forward is `mlp`, or the gated one in the file."""
    prefix = f"layers.{layer}."
    return DecoderBlock(
        attention_norm=read_norm(weights, f"{prefix}input_layernorm", config),
        attention=_read_attention(weights, f"{prefix}self_attn.", config, config.windows[layer]),
        mlp_norm=read_norm(weights, f"{prefix}post_attention_layernorm", config),
        mlp=mlp or read_mlp(weights, f"{prefix}mlp.", config, config.intermediate_size),
    )


def read_mlp(weights: ModelWeights, prefix: str, config: DecoderConfig, intermediate_size: int) -> GatedMlp:
    """The gated feed-forward of the tensors `{prefix}gate_proj`, `up_proj` and `down_proj`."""
    hidden_size = config.hidden_size
    gate_up = [f"{prefix}gate_proj", f"{prefix}up_proj"]
    return GatedMlp(
        gate_up=make_linear(
            weights.take_rows([f"{name}.weight" for name in gate_up], intermediate_size, hidden_size),
            weights.take_rows([f"{name}.bias" for name in gate_up], intermediate_size) if config.mlp_bias else None,
            natively=True,
        ),
        activation=config.activation,
        down=read_linear(weights, f"{prefix}down_proj", hidden_size, intermediate_size, has_bias=config.mlp_bias),
    )


def _read_attention(weights: ModelWeights, prefix: str, config: DecoderConfig, window: int | None) -> SelfAttention:
    num_values = config.num_heads * config.head_size
    return SelfAttention(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        window=window,
        qkv=_read_qkv(weights, prefix, config),
        qk_norm=_read_qk_norm(weights, prefix, config) if config.qk_norm else None,
        clip=config.qkv_clip,
        out=read_linear(weights, f"{prefix}o_proj", config.hidden_size, num_values, has_bias=config.out_bias),
    )


def _read_qkv(weights: ModelWeights, prefix: str, config: DecoderConfig) -> Linear:
    """Query, key and value fused into one projection, with the pairs of queries and keys side by side."""

    def fused(kind: str, *num_in: int) -> Tensor:
        num_rows = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
        parts = []
        for name, num_heads in num_rows.items():
            rows = weights.take(f"{prefix}{name}_proj.{kind}", num_heads * config.head_size, *num_in)
            parts.append(rows if name == "v" else side_by_side(rows, config.head_size))
        return torch.cat(parts)

    bias = fused("bias") if config.qkv_bias else None
    return make_linear(fused("weight", config.hidden_size), bias, natively=True)


def _read_qk_norm(weights: ModelWeights, prefix: str, config: DecoderConfig) -> HeadNorm | ProjectionNorm:
    num_heads, num_kv_heads, head_size = config.num_heads, config.num_kv_heads, config.head_size
    whole = config.qk_norm == "projection"
    of_queries, of_keys = (
        side_by_side(weights.take(f"{prefix}{name}.weight", num * head_size), head_size).view(num, head_size)
        for name, num in (("q_norm", num_heads if whole else 1), ("k_norm", num_kv_heads if whole else 1))
    )
    if whole:
        weight_HD = torch.cat((of_queries, of_keys))
        return ProjectionNorm(weight_HD=weight_HD, num_heads=num_heads, eps=config.norm_eps)
    weight_HD = torch.cat((of_queries.expand(num_heads, -1), of_keys.expand(num_kv_heads, -1)))
    return HeadNorm(weight_HD=weight_HD, eps=config.norm_eps)


def read_norm(weights: ModelWeights, name: str, config: DecoderConfig) -> RmsNorm:
    return RmsNorm(weight_C=weights.take(f"{name}.weight", config.hidden_size), eps=config.norm_eps)


def read_linear(weights: ModelWeights, name: str, num_out: int, num_in: int, *, has_bias: bool) -> Linear:
    bias_O = weights.take(f"{name}.bias", num_out) if has_bias else None
    return make_linear(weights.take(f"{name}.weight", num_out, num_in), bias_O, natively=True)
