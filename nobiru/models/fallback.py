"""Any encoder that `transformers` knows and nobiru has no code of its own for.

Where the architecture takes its attention from `transformers`' interface, a batch runs packed, as one row [1, T] with
explicit positions, and attention is ours; a trial at load time compares that with the model's own one-by-one results.
Otherwise, or if the trial differs, a batch runs through the model's own attention in groups of similar lengths, padded
and masked, or of equal lengths where padding changes an architecture's results (convolutions, Fourier transforms, …).
Knows nothing of the layers themselves.

Shape legend: T tokens, C hidden size, H heads, K key heads, D values a head, n sequences of a group, L its length.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nobiru.errors import ModelFolderError
from nobiru.folder.spec import ModelFolder
from nobiru.models.attention_interface import AttentionCall, AttentionInterface
from nobiru.models.pretrained import brief, hidden_of, load_pretrained, quiet
from nobiru.models.weights import Precision
from nobiru.ops.layout import PackedLayout, plan_groups
from nobiru.ops.packed_attention import attention_path, packed_attention
from nobiru.ops.scratch import Scratch

logger = logging.getLogger(__name__)

# Lengths beyond the local attention of known architectures, and short ones beside them.
_TRIAL_LENGTHS = (3, 160, 17, 5, 16)
_FILLER_LENGTH = 150
_WINDOW_FIELDS = ("sliding_window", "local_attention")
# Windows and tables of positions up to this many tokens are tried out; a trial has to take a second or two at most.
_MAX_TRIAL_TOKENS = 1100
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def load_fallback(folder: ModelFolder, precision: Precision, device: torch.device) -> PackedFallback | GroupedFallback:
    """The encoder of a folder; `ModelFolderError` explains what cannot be served."""
    model = load_pretrained(folder, precision).to(device)
    with torch.inference_mode(), quiet():
        encoder = _Trial(model, folder, precision.compute, device).outcome()
    logger.info("%s: %s", folder.model_type, encoder.attention)
    return encoder


class GroupedFallback:
    """Groups of similar lengths as [n, L] with an attention mask, through the model's own attention.

    The padding of a group is at most an eighth of its tokens; with `pads` false there is none.
    """

    is_reentrant = False
    has_own_threads = False
    arithmetic = "torch"

    def __init__(self, model: Any, *, padding_id: int, pads: bool, reason: str) -> None:
        self._model = model
        self._padding_id = padding_id
        self._min_run_tokens = math.inf if pads else 0
        self.attention = f"{'padded groups of similar lengths' if pads else 'groups of equal lengths'} ({reason})"

    def forward(
        self,
        token_ids_T: Tensor,
        layout: PackedLayout,
        scratch: Scratch | None = None,
        rows_R: NDArray[np.int64] | None = None,
    ) -> Tensor:
        """Hidden states [T, C] of all tokens."""
        parts = []
        for group in layout.grouped(plan_groups(layout.lengths_B, min_run_tokens=self._min_run_tokens)):
            shape = (group.num_seqs, group.length)
            if group.padded_nL is None or group.key_mask_n11L is None or group.real_t is None:
                ids_nL = token_ids_T[group.tokens].view(shape)
                parts.append(_run(self._model, ids_nL, torch.ones_like(ids_nL)).flatten(0, 1))
                continue
            mask_nL = group.key_mask_n11L[:, 0, 0]
            ids_nL = token_ids_T[group.padded_nL].view(shape).masked_fill(~mask_nL, self._padding_id)
            hidden_nLC = _run(self._model, ids_nL, mask_nL.to(ids_nL.dtype))
            parts.append(hidden_nLC.flatten(0, 1).index_select(0, group.real_t))
        return torch.cat(parts)


class PackedFallback:
    """One row [1, T] with explicit positions from `first_position`; the model's attention goes through `interface`.

    `num_calls` counts its calls in the last forward pass.
    """

    is_reentrant = False
    has_own_threads = False
    arithmetic = "torch"

    def __init__(self, model: Any, interface: AttentionInterface, *, first_position: int) -> None:
        self._model = model
        self._interface = interface
        self._first_position = first_position
        self._takes_types = "token_type_ids" in inspect.signature(model.forward).parameters
        self.num_calls = 0
        self.attention = "packed"

    def forward(
        self,
        token_ids_T: Tensor,
        layout: PackedLayout,
        scratch: Scratch | None = None,
        rows_R: NDArray[np.int64] | None = None,
    ) -> Tensor:
        """Hidden states [T, C] of all tokens."""
        ids_1T = token_ids_T[None]
        # Types are given too: a table of them inside the model is only as long as its longest sequence.
        types = {"token_type_ids": torch.zeros_like(ids_1T)} if self._takes_types else {}
        positions_1T = (layout.positions_T + self._first_position)[None]
        self.num_calls = 0
        with self._interface.within(partial(self._attend, layout)):
            return hidden_of(self._model(input_ids=ids_1T, position_ids=positions_1T, **types))[0]

    def _attend(self, layout: PackedLayout, call: AttentionCall) -> Tensor:
        self.num_calls += 1
        query_THD = call.query_THD
        path = attention_path(query_THD.device, query_THD.dtype, query_THD.shape[-1])
        self.attention = f"{path}, layers of transformers"
        # In encoders the window is |i - j| < w, as flash attention has it.
        window = None if call.window is None else call.window - 1
        return packed_attention(query_THD, call.key_TKD, call.value_TKD, layout, scale=call.scale, window=window)


class _Trial:
    """Finds out at load time what a model can do, on random token ids, compared with each sequence alone."""

    def __init__(self, model: Any, folder: ModelFolder, dtype: torch.dtype, device: torch.device) -> None:
        self._model = model
        self._folder = folder
        self._tolerance = _TOLERANCE[dtype]
        self._device = device
        self._padding_id = _padding_id(folder)
        lengths = self._lengths()
        self._layout = PackedLayout(lengths, device)
        self._ids_T = self._random_ids(int(lengths.sum()))

    def outcome(self) -> PackedFallback | GroupedFallback:
        """The fastest way of running the model whose results are right."""
        self._refuse_causal()
        alone = self._alone()
        packed = self._packed_or_reason(alone)
        if isinstance(packed, PackedFallback):
            return packed
        padded = GroupedFallback(self._model, padding_id=self._padding_id, pads=True, reason=packed)
        wrong = self._difference(padded, alone)
        if not wrong:
            return padded
        return GroupedFallback(self._model, padding_id=self._padding_id, pads=False, reason=f"padded: {wrong}")

    def _refuse_causal(self) -> None:
        """Raises if the first token's state does not depend on the tokens behind it."""
        file = self._folder.transformer_path / "config.json"
        first_id, *others = set(self._random_ids(16).tolist())
        ids_2L = torch.tensor([[first_id, other] for other in others[:2]], device=self._device)
        try:
            hidden_2LC = _run(self._model, ids_2L, torch.ones_like(ids_2L))
        except Exception as error:
            raise ModelFolderError(
                f"{file}: field 'model_type' is {self._folder.model_type!r}, which does not run on token ids alone: "
                f"{brief(error)}"
            ) from error
        first, second = hidden_2LC[:, 0]
        if bool((first - second).abs().max() <= 1e-6 * first.abs().max()):
            raise ModelFolderError(
                f"{file}: field 'model_type' is {self._folder.model_type!r}, whose attention is causal, but the "
                'folder says nothing of it; with "is_decoder": true in config.json it is taken as a decoder'
            )

    def _alone(self) -> dict[int, Tensor]:
        """Hidden states of some sequences, each run by itself, by the place where it ends."""
        alone, seen = {}, set()
        for start, end in zip(self._layout.starts_B.tolist(), self._layout.ends_B.tolist(), strict=True):
            if end - start not in seen or end == self._layout.num_tokens:
                ids_1L = self._ids_T[None, start:end]
                alone[end] = _run(self._model, ids_1L, torch.ones_like(ids_1L))[0]
                seen.add(end - start)
        return alone

    def _packed_or_reason(self, alone: Mapping[int, Tensor]) -> PackedFallback | str:
        """The model packed, with its attention replaced by ours, or why that does not work (and nothing replaced)."""
        own_name = self._model.config._attn_implementation
        interface = AttentionInterface("packed", unsupported=("position_bias", "softcap", "s_aux"))
        interface.use_in(self._model)
        reason = ""
        # Tables of positions begin at 0, or behind the padding id as in RoBERTa.
        for first_position in (0, self._padding_id + 1):
            packed = PackedFallback(self._model, interface, first_position=first_position)
            reason = self._difference(packed, alone)
            if not packed.num_calls:
                reason = "the architecture has attention of its own"
                break
            if not reason:
                return packed
        self._model.set_attn_implementation(own_name)
        return reason

    def _difference(self, encoder: PackedFallback | GroupedFallback, alone: Mapping[int, Tensor]) -> str:
        """What is wrong with the encoder's result; empty if nothing is."""
        try:
            hidden_TC = encoder.forward(self._ids_T, self._layout)
        except Exception as error:  # whatever an architecture does not support: another way takes over and says why
            return f"a batch fails with {brief(error)}"
        worst = 0.0
        for end, expected in alone.items():
            found = hidden_TC[end - expected.shape[0] : end]
            worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
        return "" if worst <= self._tolerance else f"a batch differs by {worst:.1e} from sequences alone"

    def _lengths(self) -> NDArray[np.int64]:
        """Lengths on both sides of a window, and in all more tokens than a table of positions has rows."""
        config, longest = self._folder.config, self._folder.max_model_len
        lengths = list(_TRIAL_LENGTHS)
        for name in _WINDOW_FIELDS:
            window = config.get(name)
            if isinstance(window, int) and max(_TRIAL_LENGTHS) - 8 < window < _MAX_TRIAL_TOKENS:
                lengths.append(window + 8)
        rows = config.get("max_position_embeddings")
        if isinstance(rows, int) and rows < _MAX_TRIAL_TOKENS:
            filler = min(_FILLER_LENGTH, longest)
            lengths += [filler] * (rows // filler + 1)
        return np.sort(np.minimum(np.array(lengths, dtype=np.int64), longest))

    def _random_ids(self, count: int) -> Tensor:
        """[T] token ids, none of them padding."""
        ids = np.random.default_rng(0).integers(0, self._folder.vocab_size - 1, count)
        ids += ids >= self._padding_id
        return torch.from_numpy(ids).to(self._device)


def _run(model: Any, ids_nL: Tensor, mask_nL: Tensor) -> Tensor:
    return hidden_of(model(input_ids=ids_nL, attention_mask=mask_nL))


def _padding_id(folder: ModelFolder) -> int:
    padding_id = folder.config.get("pad_token_id")
    return padding_id if isinstance(padding_id, int) and 0 <= padding_id < folder.vocab_size else 0
