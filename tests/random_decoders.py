"""Random weights of Llama's layers, and steps of a few sequences through a stack of them, for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nobiru.folder.rope import RopeSpec
from nobiru.layers.activation import ACTIVATIONS
from nobiru.layers.decoder_block import DecoderBlock, GatedMlp, SelfAttention
from nobiru.layers.decoder_stack import DecoderStack
from nobiru.layers.linear import Linear, make_linear
from nobiru.layers.rms_norm import HeadNorm, RmsNorm
from nobiru.layers.rotary import Rotary
from nobiru.ops.native import threads
from nobiru.ops.paged_layout import LayerCache, PagedLayout
from nobiru.ops.scratch import Scratch

BLOCK_SIZE, NUM_BLOCKS, NUM_LAYERS = 16, 200, 3


@dataclass(frozen=True, kw_only=True)
class Sizes:
    width: int = 96
    inner: int = 160
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    has_bias: bool = False
    has_norm: bool = False
    window: int | None = None
    activation: str = "silu"


def layers(sizes: Sizes, dtype: torch.dtype) -> tuple[list[DecoderBlock], RmsNorm, Rotary]:
    """The same random weights, exact in bfloat16, whatever the dtype."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, scale: float) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).bfloat16().to(dtype)

    def linear(num_out: int, num_in: int) -> Linear:
        bias = random(num_out, scale=0.3) if sizes.has_bias else None
        return make_linear(random(num_out, num_in, scale=num_in**-0.5), bias, natively=True)

    def norm() -> RmsNorm:
        return RmsNorm(weight_C=random(sizes.width, scale=0.1) + 1, eps=1e-5)

    of_queries, of_keys = sizes.num_heads * sizes.head_size, sizes.num_kv_heads * sizes.head_size
    heads = sizes.num_heads + sizes.num_kv_heads
    blocks = [
        DecoderBlock(
            attention_norm=norm(),
            attention=SelfAttention(
                num_heads=sizes.num_heads,
                num_kv_heads=sizes.num_kv_heads,
                head_size=sizes.head_size,
                window=sizes.window,
                qkv=linear(of_queries + 2 * of_keys, sizes.width),
                qk_norm=HeadNorm(weight_HD=random(heads, sizes.head_size, scale=0.1) + 1, eps=1e-6)
                if sizes.has_norm
                else None,
                out=linear(sizes.width, of_queries),
            ),
            mlp_norm=norm(),
            mlp=GatedMlp(
                gate_up=linear(2 * sizes.inner, sizes.width),
                activation=ACTIVATIONS[sizes.activation],
                down=linear(sizes.width, sizes.inner),
            ),
        )
        for _ in range(NUM_LAYERS)
    ]
    rope = RopeSpec(kind="default", theta=1e4)
    rotary = Rotary(rope, head_size=sizes.head_size, num_positions=1024, device=torch.device("cpu"))
    return blocks, norm(), rotary


def cache(sizes: Sizes, dtype: torch.dtype) -> list[LayerCache]:
    # What nobody has written is not a number, so that whoever reads it shows.
    shape = NUM_BLOCKS, BLOCK_SIZE, sizes.num_kv_heads, sizes.head_size
    return [
        LayerCache(
            keys_NSKD=torch.full(shape, torch.nan, dtype=dtype), values_NSKD=torch.full(shape, torch.nan, dtype=dtype)
        )
        for _ in range(NUM_LAYERS)
    ]


def outputs(
    stack: DecoderStack,
    sizes: Sizes,
    dtype: torch.dtype,
    rotary: Rotary,
    steps: Sequence[tuple[list[int], list[int]]],
    num_threads: int,
    rows: Callable[[int], Tensor | None] = lambda _: None,
) -> list[Tensor]:
    """Of each step, in float32. A step is the tokens that each sequence has in the cache, and those it has now.

    `rows` says of a step with so many tokens which are asked for, if not all.
    """
    generator = torch.Generator().manual_seed(1)
    own, found = cache(sizes, dtype), []
    for starts, lengths in steps:
        # Sequence i has the blocks i, i + 10, i + 20, …
        ids = [np.arange(i, NUM_BLOCKS, 10) for i in range(len(starts))]
        layout = PagedLayout(np.array(starts), np.array(lengths), ids, block_size=BLOCK_SIZE)
        hidden_TC = torch.randn(layout.num_tokens, sizes.width, generator=generator).bfloat16().to(dtype)
        with torch.inference_mode(), threads.kernels_only(num_threads):
            turns_T1P = rotary.turns_at(layout.positions_T)
            found.append(stack(hidden_TC, turns_T1P, layout, own, Scratch(), rows(layout.num_tokens)).float())
    return found


# Of a step's tokens those that are asked for: none, few, most.
ROWS: dict[str, Callable[[int], Tensor]] = {
    "none": lambda num_tokens: torch.arange(0),
    "last": lambda num_tokens: torch.arange(num_tokens - 1, num_tokens),
    "every third": lambda num_tokens: torch.arange(0, num_tokens, 3),
    "but the first": lambda num_tokens: torch.arange(1, num_tokens),
}
