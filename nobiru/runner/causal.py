"""Runs one step of a model over the KV cache: parts of sequences in; a token, a vector or nothing out for each.

Owns the model on its device, the cache's tensors and the sampler. Knows nothing of queues, plans or clients, nor of
which sequence holds which block. How many threads to use is set by whoever starts the process, with
`torch.set_num_threads` before loading.

A step that runs again gives the same results: it writes the same keys and values into the same slots, and what the
sampler draws depends on a request alone.

Shape legend: B sequences, R of them that need their last token's hidden state, C hidden size, V vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nobiru import machine
from nobiru.errors import ModelFolderError, NobiruError
from nobiru.folder.spec import ModelFolder
from nobiru.generation import CausalInput, SampledToken, SampleRequest
from nobiru.kv.cache import CacheShape, allocate_cache
from nobiru.layers.sharding import TensorGroup
from nobiru.models.moe import MoeParts, SlotChoice
from nobiru.models.registry import CausalModel, load_causal
from nobiru.models.weights import Precision
from nobiru.ops.native.threads import kernels_only
from nobiru.ops.paged_attention import block_table_serves, paged_attention_path
from nobiru.ops.paged_layout import LayerCache, PagedLayout
from nobiru.ops.scratch import Scratch
from nobiru.request import Vectors
from nobiru.runner.causal_batch import CausalBatch, CausalLimits, pack_causal
from nobiru.runner.dtype import dtype_name, gather_facts, resolve_device, resolve_precision
from nobiru.runner.finish import Finisher
from nobiru.runner.graphs import DecodeGraphs, bucket_sizes, cuda_capture
from nobiru.runner.shares import ShareThreads, plan_shares

_MAX_GRAPH_SEQS = 128
_LARGE_BLOCK = 256  # tokens; FlashAttention 2 takes multiples of this

CausalOutput = Vectors | SampledToken | NobiruError | None


class TokenSampler(Protocol):
    """`Sampler`, or something simpler in tests."""

    def sample(self, logits_BV: Tensor, requests: Sequence[SampleRequest]) -> list[SampledToken]:
        """One token for each row of float32 logits."""


class Followers(Protocol):
    """The other workers of this rank, which hold shares of the model too."""

    def step(self, inputs: Sequence[CausalInput]) -> AbstractContextManager[None]:
        """Have them `follow` these inputs, which this process computes meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Computed:
    """What a share of the batch gave; `sampled` and `pooled` are the caller's numbers of the sequences of each row."""

    sampled: list[int]
    logits_BV: Tensor | None
    pooled: list[int]
    vectors: list[Vectors]


# Each share reads all weights for itself, which from here on is little beside what it computes.
_MIN_SHARE_TOKENS = 256


class CausalRunner:
    """A causal model with its cache and what comes behind it. Not for several threads at once.

    `allocate_cache` comes before everything that runs. `followers` are set where the model is spread over workers and
    this is their leader.
    """

    def __init__(
        self,
        folder: ModelFolder,
        model: CausalModel,
        sampler: TokenSampler | None,
        precision: Precision,
        device: torch.device,
        max_model_len: int,
    ) -> None:
        self._folder = folder
        self._model = model
        self._sampler = sampler
        self._precision = precision
        self._device = device
        self._max_model_len = max_model_len
        self._finisher = None if folder.task == "generate" else _last_token_finisher(folder, device)
        self.followers: Followers | None = None
        self._cache: list[LayerCache] = []
        self._limits: CausalLimits | None = None
        self._graphs: DecodeGraphs | None = None
        num_threads = torch.get_num_threads()
        shared = device.type == "cpu" and model.is_reentrant and num_threads > 1
        self._threads = ShareThreads(num_threads) if shared else None
        self._of_thread = threading.local()

    @classmethod
    def load(
        cls,
        folder: ModelFolder,
        *,
        dtype: str,
        device: str,
        max_model_len: int,
        slots: SlotChoice | None = None,
        group: TensorGroup | None = None,
    ) -> CausalRunner:
        """Read the weights. `dtype` and `device` may be "auto"; `max_model_len` is the longest sequence in tokens.

        `slots` says which experts this process holds, if not all, and `group` the workers over which the model is
        spread, as `load_causal` takes them. Worker 0 of a group leads, the others `follow`.

        `ConfigError` for a device that is not there, `ModelFolderError` for a folder that cannot be honoured.
        """
        from nobiru.runner.sampler import Sampler

        facts = gather_facts()
        kind = resolve_device(device, facts)
        precision = resolve_precision(dtype, kind, facts)
        place = torch.device(kind)
        with torch.inference_mode():
            model = load_causal(folder, precision, place, slots=slots, group=group)
        machine.return_free_memory()
        samples = folder.task == "generate" and (group is None or group.shard.index == 0)
        sampler = Sampler(folder, vocab_size=model.vocab_size, device=place) if samples else None
        return cls(folder, model, sampler, precision, place, max_model_len)

    @property
    def moe(self) -> MoeParts | None:
        """The model's experts, if it has any."""
        return self._model.moe

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def device_type(self) -> str:
        """cpu or cuda."""
        return self._device.type

    def cache_shape(self, block_size: int) -> CacheShape:
        """What `nobiru.kv.cache.choose_num_blocks` needs to know of the model."""
        return CacheShape(
            num_layers=self._model.num_layers,
            num_kv_heads=self._model.num_kv_heads,
            head_size=self._model.head_size,
            dtype=self._model.dtype,
            block_size=block_size,
        )

    def fitting_block_size(self, requested: int) -> int:
        """`requested`, or on CUDA a size that the attention kernel takes block tables of, if it takes none of those.

        Without tables it reads contexts gathered for every layer, and decode steps cannot be captured as graphs.
        """
        shape = self.cache_shape(requested)
        for block_size in (requested, _LARGE_BLOCK):
            if block_table_serves(self._device, shape.dtype, shape.head_size, block_size):
                return block_size
        return requested

    def allocate_cache(self, num_blocks: int, block_size: int, *, takes_memory: bool = False) -> None:
        """`num_blocks` for sequences; what an earlier cache held is gone. `takes_memory` as in `nobiru.kv.cache`."""
        self._cache, self._graphs = [], None
        shape = self.cache_shape(block_size)
        on_cuda = self._device.type == "cuda"
        # Padding rows of captured steps write into one block more, which no sequence gets.
        self._cache = allocate_cache(shape, num_blocks + on_cuda, self._device, takes_memory=takes_memory)
        # Experts' row counts are read on the host, which cannot be captured.
        is_fixed = self._model.moe is None
        if on_cuda and is_fixed and block_table_serves(self._device, shape.dtype, shape.head_size, block_size):
            self._graphs = DecodeGraphs(
                lambda token_ids_T, layout: self._model.forward(token_ids_T, layout, self._cache),
                cuda_capture(),
                sizes=bucket_sizes(_MAX_GRAPH_SEQS),
                block_size=block_size,
                table_width=-(-self._max_model_len // block_size),
                spare_block=num_blocks,
                device=self._device,
            )
        self._limits = CausalLimits(
            vocab_size=self._folder.vocab_size,
            max_model_len=self._max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
        )

    def run(self, inputs: Sequence[CausalInput]) -> list[CausalOutput]:
        """For each input, in order: its token if it samples (or why there is none), its vector if it pools, else None.

        `InvalidRequestError` if a sequence is empty, too long or has unknown token ids; there are no results then.
        """
        with self._threads_for_step():
            return self._run(inputs)

    def _run(self, inputs: Sequence[CausalInput]) -> list[CausalOutput]:
        results: list[CausalOutput] = [None] * len(inputs)
        if not inputs:
            return results
        parts = self._run_shares(inputs)
        sampled = [number for part in parts for number in part.sampled]
        if sampled:
            logits = [part.logits_BV for part in parts if part.logits_BV is not None]
            tokens = self._sample(logits[0] if len(logits) == 1 else torch.cat(logits), [inputs[i] for i in sampled])
            for number, token in zip(sampled, tokens, strict=True):
                results[number] = token
        for part in parts:
            for number, vector in zip(part.pooled, part.vectors, strict=True):
                results[number] = vector
        return results

    def follow(self, inputs: Sequence[CausalInput]) -> None:
        """As `run`, for a worker that does not lead: its share of the step, without results."""
        batch = pack_causal(inputs, self._ready(), self._device)
        with self._threads_for_step(), torch.inference_mode():
            self._compute(batch, *_asked(batch))

    def describe(self) -> dict[str, str | int | float | bool | None]:
        """What the start line says: `dtype` is that of the weights, `compute_dtype` that of arithmetic."""
        return {
            "dtype": dtype_name(self._precision.weights),
            "compute_dtype": dtype_name(self._precision.compute),
            "device": torch.cuda.get_device_name() if self._device.type == "cuda" else "cpu",
            "architecture": self._folder.model_type,
            "attention": paged_attention_path(self._device, self._model.dtype, self._model.head_size),
        }

    def warm_up(self) -> None:
        """Run a few small batches, so that the first request does not pay for loading kernels and starting threads.

        Blocks of the cache are written; nobody's, before the first request.
        """
        limits = self._ready()
        most = min(self._max_model_len, limits.num_blocks * limits.block_size)
        blocks = np.arange(limits.num_blocks, dtype=np.int32)[: -(-most // limits.block_size)]
        for spans in (((0, 1),), ((0, 64), (0, 64)), ((0, 8), (8, 8)), ((8, 1),) * 2, ((8, 1),) * 32):
            # All write into the same slots; what they compute means nothing.
            fitting = [(start, length) for start, length in spans if start + length <= most]
            self.run([_filler(start, length, blocks, number) for number, (start, length) in enumerate(fitting)])
        if self._graphs is not None:
            self._graphs.capture_all()

    # ---- one step ----------------------------------------------------------------------------------------------------

    def _threads_for_step(self) -> AbstractContextManager[None]:
        count = torch.get_num_threads()
        return kernels_only(count) if self._model.is_native and count > 1 else nullcontext()

    def _run_shares(self, inputs: Sequence[CausalInput]) -> list[_Computed]:
        numbers = list(range(len(inputs)))
        if self._threads is not None and self._model.is_reentrant:
            shares = plan_shares(
                [each.token_ids.size for each in inputs],
                self._threads.num_threads,
                self._folder.hidden_size,
                starts=[each.start for each in inputs],
                min_share_tokens=self._min_share_tokens(),
            )
            if shares is not None:
                return self._threads.map(lambda share: self._run_share(inputs, share), shares)
        return [self._run_share(inputs, numbers)]

    def _min_share_tokens(self) -> int:
        for_weights = _MIN_SHARE_TOKENS if self._model.is_native else 0
        return for_weights if self._model.moe is None else max(for_weights, self._model.moe.min_share_tokens)

    def _run_share(self, inputs: Sequence[CausalInput], share: Sequence[int]) -> _Computed:
        batch = pack_causal([inputs[number] for number in share], self._ready(), self._device)
        numbers = [share[place] for place in batch.order]
        sampling, pooling = _asked(batch)
        together = nullcontext() if self.followers is None else self.followers.step(inputs)
        with torch.inference_mode():
            with together:
                logits_BV, hidden_RC = self._compute(batch, sampling, pooling)
            return _Computed(
                sampled=[numbers[place] for place in sampling],
                logits_BV=logits_BV,
                pooled=[numbers[place] for place in pooling],
                vectors=self._pool(hidden_RC, batch, pooling) if pooling else [],
            )

    def _compute(self, batch: CausalBatch, sampling: list[int], pooling: list[int]) -> tuple[Tensor | None, Tensor]:
        """What workers do together: logits [B, V], if any, and hidden states [R, C] of sequences at these places."""
        assert not (sampling and pooling), "a model generates or embeds"
        hidden_RC = self._hidden_states(batch, sampling or pooling)
        return self._logits(hidden_RC) if sampling else None, hidden_RC

    def _hidden_states(self, batch: CausalBatch, places: list[int]) -> Tensor:
        """[R, C]: the last token's hidden state of the sequences at `places`."""
        rows_R = _last_rows(batch.layout, places)
        captured_TC = None if self._graphs is None else self._graphs.run(batch.token_ids_T, batch.layout)
        if captured_TC is not None:
            return captured_TC if rows_R is None else captured_TC.index_select(0, rows_R)
        return self._model.forward(batch.token_ids_T, batch.layout, self._cache, self._scratch(), rows_R)

    def _logits(self, rows_RC: Tensor) -> Tensor:
        return self._model.logits(rows_RC, self._scratch())

    def _pool(self, rows_RC: Tensor, batch: CausalBatch, places: list[int]) -> list[Vectors]:
        """Last-token pooling, and the modules behind it."""
        assert self._finisher is not None, "vectors are asked of embedding models only"
        pooled_RC = rows_RC.float()
        wishes = []
        for row, place in enumerate(places):
            each = batch.inputs[place]
            assert each.pooling is not None
            wishes.append(each.pooling)
            num_skipped = 0 if self._folder.pooling.include_prompt else each.pooling.num_skipped_tokens
            if num_skipped >= each.start + each.token_ids.size:
                pooled_RC[row] = 0  # a prompt that covers the whole text leaves nothing to pool
        return self._finisher(pooled_RC, wishes)

    def _sample(self, logits_BV: Tensor, inputs: list[CausalInput]) -> Sequence[SampledToken | NobiruError]:
        """One token for each row, or the error of a row that has none: the forward pass need not run again for it."""
        assert self._sampler is not None, "tokens are asked of language models only"
        requests = [each.sample for each in inputs if each.sample is not None]
        with torch.inference_mode():
            try:
                return self._sampler.sample(logits_BV, requests)
            except NobiruError:
                return [self._sample_row(logits_BV[row, None], request) for row, request in enumerate(requests)]

    def _sample_row(self, logits_1V: Tensor, request: SampleRequest) -> SampledToken | NobiruError:
        assert self._sampler is not None
        try:
            return self._sampler.sample(logits_1V, [request])[0]
        except NobiruError as error:
            return error

    def _ready(self) -> CausalLimits:
        assert self._limits is not None, "allocate_cache comes first"
        return self._limits

    def _scratch(self) -> Scratch | None:
        """The calling thread's memory for intermediate results; none on devices whose allocator keeps memory."""
        if self._device.type != "cpu":
            return None
        scratch: Scratch | None = getattr(self._of_thread, "scratch", None)
        if scratch is None:
            scratch = self._of_thread.scratch = Scratch()
        return scratch


def _asked(batch: CausalBatch) -> tuple[list[int], list[int]]:
    """The places of sequences that get a token, and of those that get a vector."""
    sampling = [place for place, each in enumerate(batch.inputs) if each.sample is not None]
    pooling = [place for place, each in enumerate(batch.inputs) if each.pooling is not None]
    return sampling, pooling


def _last_rows(layout: PagedLayout, places: list[int]) -> Tensor | None:
    """[R]: the last tokens of the sequences at `places`; None if these are all tokens."""
    if len(places) == layout.num_seqs:
        return None if layout.is_decode else layout.last_B
    rows_R: Tensor = layout.to_device(layout.ends_B[places] - 1)
    return rows_R


def _last_token_finisher(folder: ModelFolder, device: torch.device) -> Finisher:
    if folder.pooling.modes != ("lasttoken",):
        raise ModelFolderError(
            f"{folder.path}: pooling is {', '.join(folder.pooling.modes)}; a causal model's vectors are those of the "
            "last token (lasttoken)"
        )
    return Finisher(folder, device)


def _filler(start: int, length: int, blocks: np.ndarray, number: int) -> CausalInput:
    return CausalInput(seq_id=number, token_ids=np.zeros(length, dtype=np.int32), start=start, block_ids=blocks)
