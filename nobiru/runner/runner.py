"""Runs one step of an embedding model: sequences in, one float32 vector for each out.

Owns the model on its device and the order of operations behind it. Knows nothing of queues, plans or clients. How many
threads to use is set by whoever starts the process, with `torch.set_num_threads` before loading.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from nobiru import machine
from nobiru.config import Quantization
from nobiru.folder.spec import ModelFolder
from nobiru.layers.pooling import Pooler
from nobiru.models.registry import Encoder, load_encoder
from nobiru.models.weights import Precision
from nobiru.ops.native import threads
from nobiru.ops.scratch import Scratch
from nobiru.request import SequenceInput, Vectors
from nobiru.runner.batch import pack
from nobiru.runner.dtype import dtype_name, gather_facts, resolve_device, resolve_precision
from nobiru.runner.finish import Finisher
from nobiru.runner.shares import ShareThreads, plan_shares

# So few tokens take as long to spread over the cores as to compute on one, and one core waits for nobody.
_MAX_TOKENS_ON_ONE_CORE = 24
_WARM_UP_LENGTHS = ((1,), (8, 8, 13), (64, 64))


class PoolingRunner:
    """An encoder with its pooling and modules. Not for several threads at once."""

    def __init__(
        self, folder: ModelFolder, encoder: Encoder, precision: Precision, device: torch.device, max_model_len: int
    ) -> None:
        self._folder = folder
        self._encoder = encoder
        self._precision = precision
        self._device = device
        self._max_model_len = max_model_len
        self._pooler = Pooler(folder.pooling)
        self._finisher = Finisher(folder, device)
        self._num_threads = torch.get_num_threads()
        shared = device.type == "cpu" and encoder.is_reentrant and self._num_threads > 1
        self._threads = ShareThreads(self._num_threads) if shared else None
        self._of_thread = threading.local()

    @classmethod
    def load(
        cls,
        folder: ModelFolder,
        *,
        dtype: str,
        device: str,
        max_model_len: int,
        quantization: Quantization | None = None,
    ) -> PoolingRunner:
        """Read the weights. `dtype` and `device` may be "auto"; `max_model_len` is the longest sequence in tokens.

        `ConfigError` for a device that is not there, `ModelFolderError` for a folder that cannot be honoured.
        """
        facts = gather_facts()
        kind = resolve_device(device, facts)
        precision = replace(resolve_precision(dtype, kind, facts), quantization=quantization)
        place = torch.device(kind)
        with torch.inference_mode():
            encoder = load_encoder(folder, precision, place)
        machine.return_free_memory()
        return cls(folder, encoder, precision, place, max_model_len)

    def run(self, sequences: Sequence[SequenceInput]) -> list[Vectors]:
        """One vector [D] (or [dimensions]) per sequence, in order.

        `InvalidRequestError` if a sequence is empty, too long or has unknown token ids; there are no results then.
        """
        if not sequences:
            return []
        if self._encoder.has_own_threads:
            with threads.kernels_only(self._num_threads):
                return self._run_share(sequences)
        if self._threads is None:
            return self._run_share(sequences)
        lengths = [sequence.token_ids.size for sequence in sequences]
        shares = plan_shares(lengths, self._threads.num_threads, self._folder.hidden_size)
        if shares is None:
            few = sum(lengths) <= _MAX_TOKENS_ON_ONE_CORE
            return self._threads.map(self._run_share, [sequences])[0] if few else self._run_share(sequences)
        results: list[Vectors] = [np.empty(0, dtype=np.float32)] * len(sequences)
        parts = self._threads.map(self._run_share, [[sequences[number] for number in share] for share in shares])
        for share, vectors in zip(shares, parts, strict=True):
            for number, vector in zip(share, vectors, strict=True):
                results[number] = vector
        return results

    def _run_share(self, sequences: Sequence[SequenceInput]) -> list[Vectors]:
        batch = pack(
            sequences,
            vocab_size=self._folder.vocab_size,
            max_model_len=self._max_model_len,
            device=self._device,
        )
        with torch.inference_mode():
            rows = self._pooler.rows(batch.layout, batch.num_skipped_B)
            hidden = self._encoder.forward(batch.token_ids_T, batch.layout, self._scratch(), rows)
            vectors_BD = self._pooler(hidden, batch.layout, batch.num_skipped_B)
            ordered = [sequences[number] for number in batch.order_B.tolist()]
            finished = self._finisher(vectors_BD, ordered)
        results: list[Vectors] = [np.empty(0, dtype=np.float32)] * len(sequences)
        for number, vector in zip(batch.order_B.tolist(), finished, strict=True):
            results[number] = vector
        return results

    def _scratch(self) -> Scratch | None:
        """The calling thread's memory for intermediate results; none on devices whose allocator keeps memory."""
        if self._device.type != "cpu":
            return None
        scratch: Scratch | None = getattr(self._of_thread, "scratch", None)
        if scratch is None:
            scratch = self._of_thread.scratch = Scratch()
        return scratch

    @property
    def device_type(self) -> str:
        """cpu or cuda."""
        return self._device.type

    def describe(self) -> dict[str, str | int | float | bool | None]:
        """What the start line says: `dtype` is that of the weights, `compute_dtype` that of arithmetic."""
        return {
            "dtype": dtype_name(self._precision.weights),
            "compute_dtype": dtype_name(self._precision.compute),
            "device": torch.cuda.get_device_name() if self._device.type == "cuda" else "cpu",
            "architecture": self._folder.model_type,
            "attention": self._encoder.attention,
            "arithmetic": self._encoder.arithmetic,
        }

    def tokens_per_s(self, num_tokens: int) -> float:
        """Of a batch of about that many tokens, timed once, after another that makes room for it."""
        length = min(128, self._max_model_len)
        batch = [SequenceInput(token_ids=np.zeros(length, dtype=np.int32))] * max(1, num_tokens // length)
        self.run(batch)
        started_s = time.perf_counter()
        self.run(batch)
        return length * len(batch) / (time.perf_counter() - started_s)

    def warm_up(self) -> None:
        """Run a few small batches, so that the first request does not pay for loading kernels and starting threads."""
        for lengths in _WARM_UP_LENGTHS:
            tokens = [np.zeros(min(length, self._max_model_len), dtype=np.int32) for length in lengths]
            self.run([SequenceInput(token_ids=token_ids) for token_ids in tokens])
