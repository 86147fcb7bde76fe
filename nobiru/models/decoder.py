"""What the native decoder families share: token vectors, a stack of Llama's layers, a norm, and the head.

Owns the configuration of such a model, the assembly of its layers from a file's tensors, and the forward pass over the
KV cache.

Shape legend: T tokens, R of them that are asked for, B sequences, C hidden size, V vocabulary, H query heads, K key
heads, D values a head, I input values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nobiru.folder.rope import RopeSpec, read_rope
from nobiru.folder.spec import ModelFolder
from nobiru.layers.activation import Activation
from nobiru.layers.decoder_block import Attention, DecoderBlock, FeedForward, GatedMlp, SelfAttention
from nobiru.layers.decoder_stack import make_stack
from nobiru.layers.linear import Linear, NativeLinear, make_linear
from nobiru.layers.rms_norm import HeadNorm, ProjectionNorm, RmsNorm
from nobiru.layers.rotary import KINDS, Rotary, side_by_side
from nobiru.layers.sharding import (
    WHOLE,
    HeadShare,
    Shard,
    SplitTokens,
    SpreadHead,
    SpreadProjectionNorm,
    SpreadWords,
    SummedLinear,
    TensorGroup,
)
from nobiru.models.config import DECODER_LIMITS, ConfigFields
from nobiru.models.moe import MoeConfig, MoeParts, SlotChoice, load_moe
from nobiru.models.weights import ModelWeights, Precision
from nobiru.ops.native.library import kernels_for
from nobiru.ops.paged_layout import LayerCache, PagedLayout
from nobiru.ops.scratch import Scratch

# What is normalized of queries and keys: each head, or all heads together.
QkNorm = Literal["head", "projection"]
# Token ids [T] → vectors [T, C], perhaps in another dtype than that of arithmetic.
Words = Callable[[Tensor], Tensor]
# Weights and the prefix of a layer's names ("layers.3.self_attn.") → its attention.
AttentionReader = Callable[[ModelWeights, str], Attention]

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
    # How many values of a head positions turn, if not all.
    turned_size: int | None = None


class Decoder:
    """`forward` maps a step's tokens to hidden states, `logits` some of those to scores for the next token.

    `moe` are its MoE layers, if it has any. With `is_native` what takes time is done by kernels of our own, with their
    own threads.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        words: Words,
        rotary: Rotary,
        blocks: list[DecoderBlock],
        norm: RmsNorm,
        head: Linear | None,
        moe: MoeParts | None = None,
        group: TensorGroup | None = None,
    ) -> None:
        self.num_layers = config.num_layers
        self.num_kv_heads = len(own_heads(config, group).keys)
        self.head_size = config.head_size
        self.vocab_size = config.vocab_size
        self.dtype = norm.weight_C.dtype
        self._words = words
        self._rotary = rotary
        self._stack = make_stack(blocks, norm)
        self._head = head
        self.moe = moe
        self._is_whole = group is None
        kernels = kernels_for(norm.weight_C)
        self.is_native = kernels is not None and (self.dtype == torch.float32 or kernels.multiplies_pairs)

    @property
    def is_reentrant(self) -> bool:
        if self._stack.has_own_threads or not self._is_whole:
            return False
        return self.moe is None or self.moe.is_reentrant

    def forward(
        self,
        token_ids_T: Tensor,
        layout: PagedLayout,
        cache: Sequence[LayerCache],
        scratch: Scratch | None = None,
        rows_R: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [T, C] behind the last norm, in memory of their own; keys and values go into the cache.

        With `rows_R`, int64 and ascending, those of these tokens, [R, C], as if there were no others behind the last
        layer's attention.
        """
        hidden_TC = self._words(token_ids_T).to(self.dtype)
        turns_T1P = self._rotary.turns_at(layout.positions_T)
        return self._stack(hidden_TC, turns_T1P, layout, cache, scratch, rows_R)

    def logits(self, hidden_BC: Tensor, scratch: Scratch | None = None) -> Tensor:
        """Hidden states [B, C] → scores [B, V] in float32, perhaps in the scratch's memory."""
        assert self._head is not None, "an embedding model has no head"
        head = self._head
        if isinstance(head, NativeLinear):
            return head.in_float32(hidden_BC, scratch.scores if scratch else None)
        return head(hidden_BC).float()


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
    group: TensorGroup | None = None,
    read_attention: AttentionReader | None = None,
    passed_over: Sequence[str] = (),
) -> Decoder:
    """The decoder of a folder, with its head if it is a language model, and with experts in the layers of `moe`.

    With `group` this worker's share of it: heads, columns of feed-forwards, vocabulary, and experts of `slots_LS`.
    `read_attention` reads another attention than that of most families. Tensors whose names begin with one of
    `passed_over` are not the decoder's.
    """
    weights = ModelWeights(
        folder.transformer_path,
        anchor=_TABLE,
        roots=("embed_tokens", "layers", "norm"),
        heads=("lm_head",) if folder.task == "generate" else (),
        precision=precision,
        device=device,
    )
    words, head = _read_ends(weights, config, folder, group)
    parts = None if moe is None else load_moe(weights, moe, precision, device, slots_LS)
    blocks = []
    for layer, window in enumerate(config.windows):
        prefix = f"layers.{layer}."
        attention = f"{prefix}self_attn."
        experts = None if parts is None else parts.feed_forward(layer)
        blocks.append(
            DecoderBlock(
                attention_norm=read_norm(weights, f"{prefix}input_layernorm", config),
                attention=read_attention(weights, attention)
                if read_attention is not None
                else _read_attention(weights, attention, config, window, group),
                mlp_norm=read_norm(weights, f"{prefix}post_attention_layernorm", config),
                mlp=_read_feed_forward(weights, f"{prefix}mlp.", config, experts, group),
            )
        )
    norm = read_norm(weights, "norm", config)
    weights.finish(passed_over)
    if parts is not None:
        parts.fill()
    turned_size = config.turned_size or config.head_size
    rotary = Rotary(config.rope, head_size=turned_size, num_positions=folder.max_model_len, device=device)
    return Decoder(config, words=words, rotary=rotary, blocks=blocks, norm=norm, head=head, moe=parts, group=group)


def _read_ends(
    weights: ModelWeights, config: DecoderConfig, folder: ModelFolder, group: TensorGroup | None
) -> tuple[Words, Linear | None]:
    """The table of token vectors, and the head; one tensor for both where they are tied.

    As `transformers` does, a folder that says they are, but has two different ones, is taken to have two. Workers of a
    `group` have some rows of both, as many each.
    """
    shape = config.vocab_size, config.hidden_size
    rows, num_rows = _shard(group).block(config.vocab_size)

    def filled(part_vC: Tensor) -> Tensor:
        return part_vC if len(rows) == num_rows else F.pad(part_vC, (0, 0, 0, num_rows - len(rows)))

    head_VC: Tensor | None = None
    if folder.task != "generate":
        words_VC = filled(weights.take_table(_TABLE, *shape, rows=rows))
    elif not weights.has(_HEAD):
        words_VC = head_VC = filled(weights.take(_TABLE, *shape, rows=rows))
    else:
        head_VC = filled(weights.take(_HEAD, *shape, rows=rows))
        words_VC = filled(weights.take_table(_TABLE, *shape, rows=rows))
        if config.is_tied and torch.equal(words_VC.to(head_VC.dtype), head_VC):
            words_VC = head_VC
    head = None if head_VC is None else make_linear(head_VC, None, natively=True)
    if group is None:
        return lambda token_ids_T: F.embedding(token_ids_T, words_VC), head
    words = SpreadWords(words_vC=words_VC, first=rows.start, group=group)
    return words, None if head is None else SpreadHead(linear=head, vocab_size=config.vocab_size, group=group)


def _shard(group: TensorGroup | None) -> Shard:
    return WHOLE if group is None else group.shard


def _read_feed_forward(
    weights: ModelWeights, prefix: str, config: DecoderConfig, experts: FeedForward | None, group: TensorGroup | None
) -> FeedForward:
    """`experts`, or, where there are none, the gated feed-forward in the file."""
    if experts is None:
        return read_mlp(weights, prefix, config, config.intermediate_size, group)
    return experts if group is None else SplitTokens(mlp=experts, group=group)


def read_mlp(
    weights: ModelWeights,
    prefix: str,
    config: DecoderConfig,
    intermediate_size: int,
    group: TensorGroup | None = None,
) -> GatedMlp:
    """The gated feed-forward of the tensors `{prefix}gate_proj`, `up_proj` and `down_proj`."""
    hidden_size = config.hidden_size
    own = _shard(group).part(intermediate_size, "columns in a feed-forward")
    gate_up = [f"{prefix}gate_proj", f"{prefix}up_proj"]
    weight = weights.take_rows([f"{name}.weight" for name in gate_up], intermediate_size, hidden_size, rows=own)
    bias = None
    if config.mlp_bias:
        bias = weights.take_rows([f"{name}.bias" for name in gate_up], intermediate_size, rows=own)
    return GatedMlp(
        gate_up=make_linear(weight, bias, natively=True),
        activation=config.activation,
        down=read_last(
            weights, f"{prefix}down_proj", hidden_size, intermediate_size, own, has_bias=config.mlp_bias, group=group
        ),
    )


def _read_attention(
    weights: ModelWeights, prefix: str, config: DecoderConfig, window: int | None, group: TensorGroup | None
) -> SelfAttention:
    heads, head_size = own_heads(config, group), config.head_size
    return SelfAttention(
        num_heads=len(heads.queries),
        num_kv_heads=len(heads.keys),
        head_size=head_size,
        window=window,
        qkv=_read_qkv(weights, prefix, config, heads),
        qk_norm=_read_qk_norm(weights, prefix, config, heads, group) if config.qk_norm else None,
        clip=config.qkv_clip,
        out=read_last(
            weights,
            f"{prefix}o_proj",
            config.hidden_size,
            config.num_heads * head_size,
            _values(heads.queries, head_size),
            has_bias=config.out_bias,
            group=group,
        ),
    )


def own_heads(config: DecoderConfig, group: TensorGroup | None) -> HeadShare:
    return _shard(group).heads(config.num_heads, config.num_kv_heads)


def _values(heads: range, head_size: int) -> range:
    """The numbers of the values of these heads."""
    return range(heads.start * head_size, heads.stop * head_size)


def _read_qkv(weights: ModelWeights, prefix: str, config: DecoderConfig, heads: HeadShare) -> Linear:
    """Query, key and value fused into one projection, with the pairs of queries and keys side by side."""
    size = config.head_size

    def fused(kind: str, *num_in: int) -> Tensor:
        parts = []
        for name, num_heads, own in (
            ("q", config.num_heads, heads.queries),
            ("k", config.num_kv_heads, heads.keys),
            ("v", config.num_kv_heads, heads.keys),
        ):
            rows = weights.take(f"{prefix}{name}_proj.{kind}", num_heads * size, *num_in, rows=_values(own, size))
            parts.append(rows if name == "v" else side_by_side(rows, size))
        return torch.cat(parts)

    bias = fused("bias") if config.qkv_bias else None
    return make_linear(fused("weight", config.hidden_size), bias, natively=True)


def _read_qk_norm(
    weights: ModelWeights, prefix: str, config: DecoderConfig, heads: HeadShare, group: TensorGroup | None
) -> Callable[[Tensor], Tensor]:
    size, num_queries, num_keys = config.head_size, len(heads.queries), len(heads.keys)

    def read(name: str, num_heads: int, own: range) -> Tensor:
        weight = weights.take(f"{prefix}{name}.weight", num_heads * size, rows=_values(own, size))
        return side_by_side(weight, size).view(len(own), size)

    if config.qk_norm == "head":
        of_queries, of_keys = (read(name, 1, range(1)) for name in ("q_norm", "k_norm"))
        weight_HD = torch.cat((of_queries.expand(num_queries, -1), of_keys.expand(num_keys, -1)))
        return HeadNorm(weight_HD=weight_HD, eps=config.norm_eps)
    of_queries = read("q_norm", config.num_heads, heads.queries)
    of_keys = read("k_norm", config.num_kv_heads, heads.keys)
    norm = ProjectionNorm(weight_HD=torch.cat((of_queries, of_keys)), num_heads=num_queries, eps=config.norm_eps)
    if group is None:
        return norm
    num_values = config.num_heads * size, config.num_kv_heads * heads.num_copies * size
    return SpreadProjectionNorm(norm=norm, num_values=num_values, group=group)


def read_norm(weights: ModelWeights, name: str, config: DecoderConfig) -> RmsNorm:
    return RmsNorm(weight_C=weights.take(f"{name}.weight", config.hidden_size), eps=config.norm_eps)


def read_linear(weights: ModelWeights, name: str, num_out: int, num_in: int, *, has_bias: bool) -> Linear:
    bias_O = weights.take(f"{name}.bias", num_out) if has_bias else None
    return make_linear(weights.take(f"{name}.weight", num_out, num_in), bias_O, natively=True)


def read_last(
    weights: ModelWeights,
    name: str,
    num_out: int,
    num_in: int,
    own: range,
    *,
    has_bias: bool,
    group: TensorGroup | None,
) -> Linear:
    """A layer's last projection; of its input values a worker has its `own`, and one of the workers adds the bias."""
    if group is None:
        return read_linear(weights, name, num_out, num_in, has_bias=has_bias)
    bias_O = weights.take(f"{name}.bias", num_out) if has_bias else None
    weight_OI = weights.take(f"{name}.weight", num_out, num_in, columns=own)
    linear = make_linear(weight_OI, None if group.shard.index else bias_O, natively=True)
    return SummedLinear(linear=linear, group=group)
