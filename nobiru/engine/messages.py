"""What the HTTP process and a rank say to each other, as msgpack.

Owns the wire format. Arrays travel as raw little-endian bytes: int32 token ids and lengths, float32 vectors.
"""

from __future__ import annotations

import msgspec


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add", kw_only=True):
    """Run a slice of a request: its sequences get the ids `first_seq_id`, `first_seq_id` + 1, ….

    `age_s` is how long ago the request arrived: clocks are not compared between processes.
    """

    slice_id: int
    first_seq_id: int
    arrival: int
    age_s: float
    priority: int
    alone: bool
    dimensions: int | None
    normalize: bool | None
    num_skipped_tokens: int
    lengths: bytes
    token_ids: bytes


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort", kw_only=True):
    """Forget these slices: nobody waits for them any more."""

    slice_ids: list[int]


class Probe(msgspec.Struct, frozen=True, array_like=True, tag="probe", kw_only=True):
    """Run a small forward pass and say so."""

    nonce: int


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop", kw_only=True):
    """End."""


ToRank = Add | Abort | Probe | Stop


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag="loaded", kw_only=True):
    """The model is loaded and warm. `info` says what for the start line: dtype, device, threads, limits."""

    max_num_batched_tokens: int
    info: dict[str, str | int | float | bool | None]


class StartFailed(msgspec.Struct, frozen=True, array_like=True, tag="start_failed", kw_only=True):
    """The rank cannot start; `permanent` when trying again would not help (a damaged folder, a wrong option)."""

    message: str
    permanent: bool


class Crashed(msgspec.Struct, frozen=True, array_like=True, tag="crashed", kw_only=True):
    """The rank ends because of an exception."""

    message: str


class Failure(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One sequence's error."""

    index: int
    message: str
    code: str | None


class StepDone(msgspec.Struct, frozen=True, array_like=True, tag="step_done", kw_only=True):
    """Results of one step.

    `seq_ids` (int64 bytes) are the sequences with an outcome. `vectors` holds their float32 vectors one after another,
    `vector_sizes` (int32 bytes) how many values each has: none for those with a `Failure`.
    """

    seq_ids: bytes
    vector_sizes: bytes
    vectors: bytes
    failures: list[Failure]
    queue_s: list[float]
    num_sequences: int
    num_tokens: int
    compute_s: float


class ProbeDone(msgspec.Struct, frozen=True, array_like=True, tag="probe_done", kw_only=True):
    """The forward pass of a probe has ended."""

    nonce: int


FromRank = Loaded | StartFailed | Crashed | StepDone | ProbeDone

_encoder = msgspec.msgpack.Encoder()
_to_rank = msgspec.msgpack.Decoder(ToRank)
_from_rank = msgspec.msgpack.Decoder(FromRank)


def encode(message: ToRank | FromRank) -> bytes:
    return _encoder.encode(message)


def decode_to_rank(data: bytes) -> ToRank:
    return _to_rank.decode(data)


def decode_from_rank(data: bytes) -> FromRank:
    return _from_rank.decode(data)
