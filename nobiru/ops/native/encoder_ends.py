"""Calls the kernels of `encoder_ends.h` with torch tensors: what stands before an encoder's layers and behind them.

Shape legend: T tokens, C hidden size, V rows of the table of words, P of the table of positions, B sequences.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nobiru.ops.native import threads
from nobiru.ops.native.encoder import GRAIN, NormStruct
from nobiru.ops.native.library import Kernels, load_kernels

_DTYPES = (torch.float32, torch.bfloat16)


class _Embeddings(ctypes.Structure):
    """`struct embeddings` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("words", "positions", "ids", "places", "hidden")),
        ("norm", NormStruct),
        *((name, ctypes.c_long) for name in ("tokens", "width")),
        *((name, ctypes.c_int) for name in ("has_half_words", "is_half", "threads", "failed")),
    )


class _TokenSums(ctypes.Structure):
    """`struct token_sums` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("hidden", "weights", "starts", "sums")),
        *((name, ctypes.c_long) for name in ("sequences", "width")),
        *((name, ctypes.c_int) for name in ("is_half", "threads")),
    )


class EncoderEnds:
    """The library's embeddings and sums of tokens, on all threads of the caller."""

    def __init__(self, kernels: Kernels) -> None:
        self._library = kernels.library
        for function in (self._library.embed, self._library.sum_tokens):
            function.argtypes, function.restype = (ctypes.c_void_p,), None

    def embed(
        self,
        token_ids_T: Tensor,
        places_T: Tensor,
        words_VC: Tensor,
        positions_PC: Tensor,
        norm: tuple[Tensor, Tensor, float],
    ) -> Tensor:
        """[T, C], as positions are: rows of both tables added and normalized, in float32 up to the last rounding.

        `norm` is a layer normalization's weight [C] and bias [C] in float32, and its epsilon. Ids and places are within
        the tables.
        """
        ids_T, places_T = token_ids_T.int().contiguous(), places_T.long().contiguous()
        weight_C, bias_C, eps = norm
        assert words_VC.is_contiguous() and positions_PC.is_contiguous()
        num_tokens, width = ids_T.numel(), positions_PC.shape[1]
        hidden_TC = positions_PC.new_empty(num_tokens, width)
        arguments = _Embeddings(
            words_VC.data_ptr(),
            positions_PC.data_ptr(),
            ids_T.data_ptr(),
            places_T.data_ptr(),
            hidden_TC.data_ptr(),
            NormStruct(weight_C.data_ptr(), bias_C.data_ptr(), eps),
            num_tokens,
            width,
            words_VC.dtype == torch.bfloat16,
            positions_PC.dtype == torch.bfloat16,
            threads.num_threads(),
        )
        self._library.embed(ctypes.addressof(arguments))
        if arguments.failed:
            raise MemoryError(f"no memory for the embeddings of {num_tokens} tokens")
        return hidden_TC

    def sum_tokens(self, hidden_TC: Tensor, weights_T: NDArray[np.float32], starts: NDArray[np.int64]) -> Tensor:
        """[B, C] float32: each sequence's tokens times their weights; `starts` [B + 1] as in `encode`."""
        hidden_TC = hidden_TC.contiguous()
        num_seqs, width = starts.size - 1, hidden_TC.shape[1]
        sums_BC = torch.empty(num_seqs, width)
        arguments = _TokenSums(
            hidden_TC.data_ptr(),
            weights_T.ctypes.data,
            starts.ctypes.data,
            sums_BC.data_ptr(),
            num_seqs,
            width,
            hidden_TC.dtype == torch.bfloat16,
            threads.num_threads(),
        )
        self._library.sum_tokens(ctypes.addressof(arguments))
        return sums_BC


@functools.cache
def _load() -> EncoderEnds | None:
    kernels = load_kernels()
    return None if kernels is None else EncoderEnds(kernels)


def ends_for(*tables: Tensor) -> EncoderEnds | None:
    """The kernels, if they take such tables [·, C]; None: they do not, or there are none."""
    for table in tables:
        if table.device.type != "cpu" or table.dtype not in _DTYPES or table.shape[1] % GRAIN:
            return None
    return _load()
