"""`LLM`: the offline interface. It drives the same engine core as the server, in the caller's process.

Owns the way from prompts to outputs of both kinds of models, embedding models and language models.
"""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from nobiru.config import Device, Dtype, EngineConfig, Quantization, SchedulingPolicy
from nobiru.engine.build import build_engine
from nobiru.engine.core import EngineCore
from nobiru.engine.limits import OFFLINE_TOKEN_BUDGET
from nobiru.engine.offline import GenerationRun
from nobiru.engine.sequences import embedding_sequence
from nobiru.errors import InvalidRequestError, NobiruError
from nobiru.folder.resolve import resolve_model
from nobiru.frontend.frontend import Frontend
from nobiru.frontend.generation import GenerationFrontend
from nobiru.generation import GenerationRequest, RequestOutput, SamplingParams
from nobiru.ops.similarity import similarity
from nobiru.request import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    EncodedPrompts,
    PoolingParams,
    SequenceInput,
    Vectors,
)
from nobiru.scheduler import Sequence as ScheduledSequence

logger = logging.getLogger("nobiru")

Prompts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
Params = SamplingParams | Sequence[SamplingParams]
Message = Mapping[str, Any]
Chats = Sequence[Message] | Sequence[Sequence[Message]]


class LLM:
    """A model in this process: `embed` with an embedding model, `generate` and `chat` with a language model.

    `model` is a local folder, a name in the local Hugging Face cache or on the hub, or None for the packaged default.
    Options are those of `nobiru serve`; texts to embed that are longer than the limit are cut as sentence-transformers
    cuts them.
    Raises `ConfigError` for a bad option and `ModelFolderError` for a folder that cannot be honoured.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        dtype: Dtype = "auto",
        device: Device = "auto",
        max_num_batched_tokens: int | None = None,
        max_num_seqs: int = 256,
        max_model_len: int | None = None,
        quantization: Quantization | None = None,
        scheduling_policy: SchedulingPolicy = "priority",
        num_threads: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        kv_cache_memory_share: float | None = None,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        async_scheduling: bool | None = None,
        tensor_parallel_size: int = 1,
    ) -> None:
        folder = resolve_model(model)
        if model is None:
            logger.warning("no model given: using all-MiniLM-L6-v2, as installed in %s", folder)
        config = EngineConfig(
            model=str(folder),
            dtype=dtype,
            device=device,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            quantization=quantization,
            scheduling_policy=scheduling_policy,
            num_threads=num_threads,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            kv_cache_memory_share=kv_cache_memory_share,
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            async_scheduling=async_scheduling,
            tensor_parallel_size=tensor_parallel_size,
        )
        engine = build_engine(config, default_budget=OFFLINE_TOKEN_BUDGET)
        self._core: EngineCore = engine.core
        self._end_workers = weakref.finalize(self, engine.close)
        self._frontend: Frontend | GenerationFrontend
        if engine.folder.task == "generate":
            self._frontend = GenerationFrontend(engine.folder)
        else:
            self._frontend = Frontend(engine.folder, auto_truncate=True)
        self._policy = config.scheduling_policy
        self._next_id = 0
        self.folder = engine.folder
        self.info = engine.info

    def close(self) -> None:
        """End the other processes of a model with `tensor_parallel_size`; it cannot be used afterwards.

        They also end with this object, and with this process.
        """
        self._end_workers()

    @property
    def embedding_dim(self) -> int:
        """The size of a vector when `dimensions` is not given."""
        return self.folder.embedding_dim

    def embed(
        self, prompts: Prompts, pooling_params: PoolingParams | None = None, *, use_tqdm: bool = True
    ) -> list[EmbeddingRequestOutput]:
        """One output per prompt, in order; a prompt is a text or a list of token ids.

        Raises `InvalidRequestError` before anything runs when a prompt or an option is wrong, and the prompt's own
        error when the model fails on it.
        """
        frontend = self._frontend
        if isinstance(frontend, GenerationFrontend):
            raise InvalidRequestError(
                f"the model {self.folder.name!r} generates text and makes no embeddings; use generate or chat",
                code="model_does_not_embed",
            )
        params = pooling_params or PoolingParams()
        self._check_priority(params.priority)
        if not isinstance(prompts, str) and len(prompts) == 0:
            return []
        encoded = frontend.prepare(prompts, params)
        vectors = self._run(encoded, params, use_tqdm=use_tqdm)
        ends = np.cumsum(encoded.lengths)
        ids = np.split(encoded.token_ids, ends[:-1])
        return [
            EmbeddingRequestOutput(
                outputs=EmbeddingOutput(embedding=vector), prompt_token_ids=each.tolist(), truncated=bool(truncated)
            )
            for vector, each, truncated in zip(vectors, ids, encoded.truncated, strict=True)
        ]

    def encode(
        self, prompts: Prompts, pooling_params: PoolingParams | None = None, *, use_tqdm: bool = True
    ) -> list[EmbeddingRequestOutput]:
        """Like `embed`, but the raw pooled vectors: the model's own Normalize module is left out."""
        params = pooling_params or PoolingParams()
        if params.normalize is None:
            params = replace(params, normalize=False)
        return self.embed(prompts, params, use_tqdm=use_tqdm)

    def generate(
        self, prompts: Prompts, sampling_params: Params | None = None, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """One output per prompt, in order; a prompt is a text or a list of token ids.

        `sampling_params` are for all prompts, or a list with one for each; None: `default_sampling_params()`. Raises
        `InvalidRequestError` before anything runs when a prompt or an option is wrong, and the prompt's own error when
        the model fails on it.
        """
        given = _as_list(prompts)
        frontend = self._generation()
        requests = [
            frontend.prepare(prompt, params, request_id=str(number))
            for number, (prompt, params) in enumerate(
                zip(given, self._params(sampling_params, len(given)), strict=True)
            )
        ]
        texts = [prompt if isinstance(prompt, str) else None for prompt in given]
        return self._run_generation(requests, texts, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Chats,
        sampling_params: Params | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """As `generate`, from one conversation or several, written by the model's chat template."""
        chats: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        frontend = self._generation()
        requests = [
            frontend.prepare_chat(
                chat,
                params,
                request_id=str(number),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=chat_template_kwargs,
            )
            for number, (chat, params) in enumerate(zip(chats, self._params(sampling_params, len(chats)), strict=True))
        ]
        return self._run_generation(requests, [None] * len(requests), use_tqdm=use_tqdm)

    def default_sampling_params(self) -> SamplingParams:
        """What the model's `generation_config.json` says, and at most 16 tokens."""
        defaults: dict[str, Any] = dict(self._generation().spec.sampling_defaults)
        return SamplingParams(**{"max_tokens": 16, **defaults})

    def similarity(self, first: Any, second: Any) -> Vectors:
        """Similarities [N, M] of vectors [N, D] and [M, D] by the model's own measure (`similarity_fn_name`)."""
        return similarity(self.folder.similarity, np.asarray(first), np.asarray(second))

    def _generation(self) -> GenerationFrontend:
        if not isinstance(self._frontend, GenerationFrontend):
            raise InvalidRequestError(
                f"the model {self.folder.name!r} makes embeddings and generates no text; use embed",
                code="model_does_not_generate",
            )
        return self._frontend

    def _params(self, given: Params | None, count: int) -> Sequence[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            given = [given or self.default_sampling_params()] * count
        if len(given) != count:
            raise InvalidRequestError(
                f"there are {len(given)} sampling_params for {count} prompts; give one for all, or one for each",
                param="sampling_params",
            )
        for params in given:
            self._check_priority(params.priority)
        return given

    def _check_priority(self, priority: int) -> None:
        if priority and self._policy == "fcfs":
            raise InvalidRequestError(
                f"priority is {priority}, but scheduling_policy is fcfs, which serves in order of arrival",
                param="priority",
            )

    def _run_generation(
        self, requests: Sequence[GenerationRequest], texts: Sequence[str | None], *, use_tqdm: bool
    ) -> list[RequestOutput]:
        streams = [self._generation().text_streams(request) for request in requests]
        run = GenerationRun(self._core, requests, texts, streams, first_id=self._next_id)
        self._next_id = run.end_id
        with _progress("Generating", run.num_sequences, "tokens", shown=use_tqdm) as advance:
            return run.outputs(advance)

    def _run(self, encoded: EncodedPrompts, params: PoolingParams, *, use_tqdm: bool) -> list[Vectors]:
        """Queue every sequence, shortest first so that neighbours in a batch are alike, and step until all are done."""
        order = np.argsort(encoded.lengths, kind="stable").tolist()
        first_id = self._next_id
        self._next_id += len(order)
        self._core.add(self._sequences(encoded, params, order, first_id))
        results: list[Vectors | None] = [None] * len(order)
        try:
            with _progress("Embedding", len(order), "texts", shown=use_tqdm) as advance:
                while (output := self._core.step()) is not None:
                    for sequence, outcome in zip(output.sequences, output.outcomes, strict=True):
                        if isinstance(outcome, NobiruError):
                            outcome.param = f"prompts[{order[sequence.seq_id - first_id]}]"
                            raise outcome
                        assert isinstance(outcome, np.ndarray)
                        results[order[sequence.seq_id - first_id]] = outcome
                    advance(len(output.sequences), len(output.sequences))
        except BaseException:
            self._core.abort(range(first_id, self._next_id))
            raise
        return [result for result in results if result is not None]

    def _sequences(
        self, encoded: EncodedPrompts, params: PoolingParams, order: Sequence[int], first_id: int
    ) -> Iterator[ScheduledSequence]:
        ends = np.cumsum(encoded.lengths).tolist()
        lengths = encoded.lengths.tolist()
        now_s = time.monotonic()
        for number, index in enumerate(order):
            payload = SequenceInput(
                token_ids=encoded.token_ids[ends[index] - lengths[index] : ends[index]],
                dimensions=params.dimensions,
                normalize=params.normalize,
                num_skipped_tokens=encoded.num_skipped_tokens,
            )
            yield embedding_sequence(
                payload,
                is_causal=self.folder.is_causal,
                seq_id=first_id + number,
                arrival=first_id + number,
                arrival_s=now_s,
                priority=params.priority,
            )


def _as_list(prompts: Prompts) -> Sequence[str | Sequence[int]]:
    """One prompt per item."""
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) and isinstance(prompts[0], int | np.integer):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


Advance = Callable[[int, int], None]


@contextmanager
def _progress(what: str, total: int, unit: str, *, shown: bool) -> Iterator[Advance]:
    """A progress bar on a terminal, for work that is long enough to wait for.

    Gives the function that advances it, by so many of `total` and so many units for the rate.
    """
    if not shown or total < 64 or not sys.stderr.isatty():
        yield lambda count, units: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} " + unit + "/s"),
        TimeRemainingColumn(),
    )
    started_s, done, num_units = time.monotonic(), 0, 0
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total, rate=0.0)

        def advance(count: int, units: int) -> None:
            nonlocal done, num_units
            done += count
            num_units += units
            bar.update(task, completed=done, rate=num_units / max(1e-6, time.monotonic() - started_s))

        yield advance
