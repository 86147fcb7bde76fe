"""`LLM`: the offline interface. It drives the same engine core as the server, in the caller's process."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from nobiru.config import Device, Dtype, EngineConfig, SchedulingPolicy
from nobiru.engine.build import build_engine
from nobiru.engine.core import EngineCore
from nobiru.engine.limits import OFFLINE_TOKEN_BUDGET
from nobiru.errors import InvalidRequestError, NobiruError
from nobiru.folder.resolve import resolve_model
from nobiru.frontend.frontend import Frontend
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


class LLM:
    """An embedding model in this process.

    `model` is a local folder, a name in the local Hugging Face cache or on the hub, or None for the packaged default.
    Options are those of `nobiru serve`; texts longer than the limit are cut as sentence-transformers cuts them.
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
        quantization: None = None,
        scheduling_policy: SchedulingPolicy = "priority",
        num_threads: int | None = None,
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
        )
        engine = build_engine(config, default_budget=OFFLINE_TOKEN_BUDGET)
        self._core: EngineCore = engine.core
        self._frontend = Frontend(engine.folder, auto_truncate=True)
        self._policy = config.scheduling_policy
        self._next_id = 0
        self.folder = engine.folder
        self.info = engine.info

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
        params = pooling_params or PoolingParams()
        if params.priority and self._policy == "fcfs":
            raise InvalidRequestError(
                f"priority is {params.priority}, but scheduling_policy is fcfs, which serves in order of arrival",
                param="priority",
            )
        if not isinstance(prompts, str) and len(prompts) == 0:
            return []
        encoded = self._frontend.prepare(prompts, params)
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

    def similarity(self, first: Any, second: Any) -> Vectors:
        """Similarities [N, M] of vectors [N, D] and [M, D] by the model's own measure (`similarity_fn_name`)."""
        return similarity(self.folder.similarity, np.asarray(first), np.asarray(second))

    def _run(self, encoded: EncodedPrompts, params: PoolingParams, *, use_tqdm: bool) -> list[Vectors]:
        """Queue every sequence, shortest first so that neighbours in a batch are alike, and step until all are done."""
        order = np.argsort(encoded.lengths, kind="stable").tolist()
        first_id = self._next_id
        self._next_id += len(order)
        self._core.add(self._sequences(encoded, params, order, first_id))
        results: list[Vectors | None] = [None] * len(order)
        try:
            with _progress(len(order), shown=use_tqdm) as advance:
                while (output := self._core.step()) is not None:
                    for sequence, outcome in zip(output.sequences, output.outcomes, strict=True):
                        if isinstance(outcome, NobiruError):
                            outcome.param = f"prompts[{order[sequence.seq_id - first_id]}]"
                            raise outcome
                        results[order[sequence.seq_id - first_id]] = outcome
                    advance(output.num_sequences)
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
            yield ScheduledSequence(
                seq_id=first_id + number,
                num_tokens=lengths[index],
                arrival=first_id + number,
                arrival_s=now_s,
                priority=params.priority,
                payload=payload,
            )


@contextmanager
def _progress(total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal, for work that is long enough to wait for; gives the function that advances it."""
    if not shown or total < 64 or not sys.stderr.isatty():
        yield lambda count: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} texts/s"),
        TimeRemainingColumn(),
    )
    started_s, done = time.monotonic(), 0
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("Embedding", total=total, rate=0.0)

        def advance(count: int) -> None:
            nonlocal done
            done += count
            bar.update(task, completed=done, rate=done / max(1e-6, time.monotonic() - started_s))

        yield advance
