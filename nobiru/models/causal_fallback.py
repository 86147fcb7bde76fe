"""Any decoder that `transformers` knows and nobiru has no code of its own for, over our KV cache.

The architecture has to take its attention from `transformers`' interface: a step runs as one row [1, T] with explicit
positions, and attention is ours. A trial at load time compares that, in one go, in chunks and token by token, with the
model's own results for each text alone; if they differ, the architecture is refused. Knows nothing of the layers
themselves.

Shape legend: T tokens, B sequences, C hidden size, V vocabulary, H query heads, K key heads, D values a head, L tokens
of one text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nobiru.errors import ModelFolderError
from nobiru.folder.spec import ModelFolder
from nobiru.models.attention_interface import AttentionCall, AttentionInterface
from nobiru.models.pretrained import brief, hidden_of, load_pretrained, quiet
from nobiru.models.weights import Precision
from nobiru.ops.paged_attention import paged_attention
from nobiru.ops.paged_layout import LayerCache, PagedLayout
from nobiru.ops.scratch import Scratch

_TRIAL_LENGTHS = (3, 40, 5, 16, 17)
_TRIAL_BLOCK_SIZE = 4
# A window up to this many tokens is tried out; a trial has to take a second or two at most.
_MAX_TRIAL_WINDOW = 600
# The largest difference, as a part of the largest value.
_TOLERANCE = 1e-4
# Of half precision the mean difference, as a part of the mean value: single tokens may differ by much, where experts
# are chosen by scores that are almost equal.
_HALF_TOLERANCE = 0.25


def load_causal_fallback(folder: ModelFolder, precision: Precision, device: torch.device) -> CausalFallback:
    """The decoder of a folder; `ModelFolderError` explains what cannot be served."""
    model = load_pretrained(folder, precision).to(device)
    with torch.inference_mode(), quiet():
        return _Trial(model, folder, precision.compute, device).outcome()


class CausalFallback:
    """A decoder of `transformers` whose attention is that of `interface`. `head` is None for embedding models."""

    is_native = False
    is_reentrant = False
    moe = None

    def __init__(
        self, body: Any, head: _Head | None, interface: AttentionInterface, shape: _CacheShape, vocab_size: int
    ) -> None:
        self.num_layers = shape.num_layers
        self.num_kv_heads = shape.num_kv_heads
        self.head_size = shape.head_size
        self.vocab_size = vocab_size
        self.dtype = shape.dtype
        self._body = body
        self._head = head
        self._interface = interface

    def forward(
        self,
        token_ids_T: Tensor,
        layout: PagedLayout,
        cache: Sequence[LayerCache],
        scratch: Scratch | None = None,
        rows_R: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [T, C] behind the last norm, or of some tokens [R, C]; keys and values go into the cache."""
        caches = iter(cache)
        with self._interface.within(lambda call: _attend_cached(call, layout, next(caches))):
            hidden_TC = hidden_of(
                self._body(input_ids=token_ids_T[None], position_ids=layout.positions_T[None], use_cache=False)
            )[0]
        return hidden_TC if rows_R is None else hidden_TC.index_select(0, rows_R)

    def logits(self, hidden_BC: Tensor, scratch: Scratch | None = None) -> Tensor:
        """Hidden states [B, C] → scores [B, V] in float32."""
        assert self._head is not None, "an embedding model has no head"
        return self._head.logits(hidden_BC)


def _attend_cached(call: AttentionCall, layout: PagedLayout, cache: LayerCache) -> Tensor:
    """Keys and values go into a layer's cache, queries attend to it."""
    return paged_attention(
        call.query_THD,
        call.key_TKD.to(cache.keys_NSKD.dtype),
        call.value_TKD.to(cache.keys_NSKD.dtype),
        cache,
        layout,
        scale=call.scale,
        window=call.window,
        softcap=call.softcap,
    )


class _Head:
    """What a language model of `transformers` does behind its layers: the projection, and any scaling of its results.

    Only the model itself knows that, so it runs with its layers replaced by something that returns given hidden states.
    """

    def __init__(self, model: Any, output_class: type[Any]) -> None:
        self._model = model
        self._given = _GivenHidden(output_class)
        setattr(model, model.base_model_prefix, self._given)

    def logits(self, hidden_BC: Tensor, scratch: Scratch | None = None) -> Tensor:
        self._given.hidden_1BC = hidden_BC[None]
        any_ids_1B = torch.zeros(1, hidden_BC.shape[0], dtype=torch.int64, device=hidden_BC.device)
        logits_BV: Tensor = self._model(input_ids=any_ids_1B, use_cache=False).logits[0]
        return logits_BV.float()


class _GivenHidden(torch.nn.Module):
    """Stands where a model's layers were, or any part of them that the model calls."""

    def __init__(self, output_class: type[Any]) -> None:
        super().__init__()
        self.output_class = output_class
        self.hidden_1BC = torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.output_class(last_hidden_state=self.hidden_1BC)


@dataclass(frozen=True, kw_only=True, slots=True)
class _CacheShape:
    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    def empty_cache(self, num_blocks: int, device: torch.device) -> list[LayerCache]:
        def zeros() -> Tensor:
            shape = num_blocks, _TRIAL_BLOCK_SIZE, self.num_kv_heads, self.head_size
            return torch.zeros(shape, dtype=self.dtype, device=device)

        return [LayerCache(keys_NSKD=zeros(), values_NSKD=zeros()) for _ in range(self.num_layers)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _TrialRun:
    """The first step has all of a text but the last `num_left` tokens, each later one `num_later`."""

    num_left: int
    num_later: int

    def next_end(self, start: int, length: int) -> int:
        return min(length, start + self.num_later if start else max(length - self.num_left, 1))


# In one go, cut once, and token by token at the end.
_TRIAL_RUNS = (
    _TrialRun(num_left=0, num_later=1),
    _TrialRun(num_left=11, num_later=11),
    _TrialRun(num_left=3, num_later=1),
)


class _Trial:
    """Finds out at load time whether a model runs over the cache, on random token ids."""

    def __init__(self, model: Any, folder: ModelFolder, dtype: torch.dtype, device: torch.device) -> None:
        self._model = model
        self._folder = folder
        self._dtype = dtype
        self._device = device
        generator = np.random.default_rng(0)
        self._texts = [torch.from_numpy(generator.integers(0, folder.vocab_size, length)) for length in self._lengths()]

    def outcome(self) -> CausalFallback:
        self._refuse_chunked_attention()
        expected = self._own_results()
        interface = AttentionInterface("over the KV cache", unsupported=("position_bias", "s_aux"))
        interface.use_in(self._model)
        body = self._model.base_model  # of a model without a head, the model
        output_class, shape = self._measure(body, interface)
        head = _Head(self._model, output_class) if self._folder.task == "generate" else None
        decoder = CausalFallback(body, head, interface, shape, self._folder.vocab_size)
        for run in _TRIAL_RUNS:
            self._compare(self._results(decoder, shape, run), expected)
        return decoder

    def _own_results(self) -> list[Tensor]:
        """The model's own logits [L, V], or hidden states, of each text alone."""
        results = []
        for ids_L in self._texts:
            try:
                output = self._model(input_ids=ids_L[None].to(self._device), use_cache=False)
            except Exception as error:
                raise self._refusal(f"it does not run on token ids alone: {brief(error)}") from error
            results.append((output.logits if self._folder.task == "generate" else hidden_of(output))[0].float())
        return results

    def _measure(self, body: Any, interface: AttentionInterface) -> tuple[type[Any], _CacheShape]:
        """What the model's layers return, and what they ask of the cache."""
        ids_1L = self._texts[0][None].to(self._device)
        calls: list[AttentionCall] = []

        def note(call: AttentionCall) -> Tensor:
            if call.key_TKD.shape != call.value_TKD.shape:
                raise ValueError("the cache takes no keys and values of different shapes")
            calls.append(call)
            return torch.zeros_like(call.query_THD)

        try:
            positions_1L = torch.arange(ids_1L.shape[1], device=self._device)[None]
            with interface.within(note):
                output = body(input_ids=ids_1L, position_ids=positions_1L, use_cache=False)
        except Exception as error:
            raise self._refusal(f"with attention replaced, it fails with {brief(error)}") from error
        if not calls:
            raise self._refusal("it has attention of its own")
        _, num_kv_heads, head_size = calls[0].key_TKD.shape
        if len({call.key_TKD.shape for call in calls}) > 1:
            raise self._refusal("its layers have keys of different shapes")
        self._refuse_hidden_window({call.window for call in calls})
        shape = _CacheShape(num_layers=len(calls), num_kv_heads=num_kv_heads, head_size=head_size, dtype=self._dtype)
        return type(output), shape

    def _results(self, decoder: CausalFallback, shape: _CacheShape, run: _TrialRun) -> list[Tensor]:
        """Our results for all texts together."""
        lengths = [ids_L.shape[0] for ids_L in self._texts]
        counts = [-(-length // _TRIAL_BLOCK_SIZE) for length in lengths]
        free = iter(np.random.default_rng(1).permutation(sum(counts)).tolist())
        tables = [[next(free) for _ in range(count)] for count in counts]
        cache = shape.empty_cache(sum(counts), self._device)
        results: list[list[Tensor]] = [[] for _ in lengths]
        starts = [0] * len(lengths)
        while unfinished := [index for index, length in enumerate(lengths) if starts[index] < length]:
            ends = [run.next_end(starts[index], lengths[index]) for index in unfinished]
            layout = PagedLayout(
                np.array([starts[index] for index in unfinished]),
                np.array([end - starts[index] for index, end in zip(unfinished, ends, strict=True)]),
                [tables[index] for index in unfinished],
                block_size=_TRIAL_BLOCK_SIZE,
                device=self._device,
            )
            parts = [self._texts[index][starts[index] : end] for index, end in zip(unfinished, ends, strict=True)]
            try:
                hidden_TC = decoder.forward(torch.cat(parts).to(self._device), layout, cache)
                rows = hidden_TC if self._folder.task != "generate" else decoder.logits(hidden_TC)
            except Exception as error:
                raise self._refusal(f"over the KV cache it fails with {brief(error)}") from error
            for index, part in zip(unfinished, torch.split(rows.float(), [len(part) for part in parts]), strict=True):
                results[index].append(part)
            for index, end in zip(unfinished, ends, strict=True):
                starts[index] = end
        return [torch.cat(parts) for parts in results]

    def _compare(self, found: list[Tensor], expected: list[Tensor]) -> None:
        found_T, expected_T = torch.cat(found), torch.cat(expected)
        difference_T = (found_T - expected_T).abs()
        if self._dtype == torch.float32:
            wrong, tolerance = float(difference_T.max() / expected_T.abs().max()), _TOLERANCE
        else:
            wrong, tolerance = float(difference_T.mean() / expected_T.abs().mean()), _HALF_TOLERANCE
        if not wrong <= tolerance:
            raise self._refusal(f"over the KV cache, its results differ by {wrong:.1e} from those of texts alone")

    def _lengths(self) -> list[int]:
        """Lengths on both sides of a window."""
        lengths = list(_TRIAL_LENGTHS)
        if (window := self._window()) is not None and 8 < window < _MAX_TRIAL_WINDOW:
            lengths.append(window + 8)
        return [min(length, self._folder.max_model_len) for length in lengths]

    def _window(self) -> int | None:
        """The window of the layers that have one, None if no text outgrows it."""
        config = self._model.config
        window = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None)
        if not isinstance(window, int) or window >= self._folder.max_model_len:
            return None
        return window if kinds is None or "sliding_attention" in kinds else None

    def _refuse_hidden_window(self, seen: set[int | None]) -> None:
        """A window that the attention function is not told of may be longer than what a trial can try."""
        if self._window() is not None and seen == {None}:
            raise self._refusal("its sliding window is not passed to the attention function")

    def _refuse_chunked_attention(self) -> None:
        size = getattr(self._model.config, "attention_chunk_size", None)
        if isinstance(size, int) and size < self._folder.max_model_len:
            raise self._refusal(f"it attends within chunks; up to max_model_len={size} it can be served")

    def _refusal(self, reason: str) -> ModelFolderError:
        file = self._folder.transformer_path / "config.json"
        return ModelFolderError(
            f"{file}: field 'model_type' is {self._folder.model_type!r}, a decoder that cannot be served: {reason}"
        )
