"""What the leader of a rank and its other workers say to each other, as msgpack.

Owns the shapes of these messages and the packing of a step's inputs. Light enough for every process.

Shape legend: B sequences, T tokens of all of them, N blocks of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from nobiru.config import EngineConfig
from nobiru.engine.messages import Abandon, Begin, Forget, Form, Formed, Moved, MoveExperts, Vacate
from nobiru.engine.rank_spec import Place
from nobiru.generation import CausalInput, GenerationInput, SampleRequest, SamplingParams
from nobiru.request import SequenceInput

# What becomes of logits and hidden states is the leader's business.
_ASKED = SampleRequest(input=GenerationInput(params=SamplingParams(seed=0)), prompt_token_ids=(), output_token_ids=())
_POOLED = SequenceInput(token_ids=np.zeros(0, np.int32))


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One JSON line on the worker's standard input: what to load as worker `index` of the rank at `place`.

    `store_port` is where the rank's workers meet, `recorder_fd` an inherited descriptor: where the heart beats.
    """

    index: int
    place: Place
    endpoint: str
    recorder_fd: int
    store_port: int
    engine: EngineConfig
    num_threads: int
    log_level: str


class Allocate(msgspec.Struct, frozen=True, array_like=True, tag="allocate", kw_only=True):
    """Make the KV cache."""

    num_blocks: int
    block_size: int


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step", kw_only=True):
    """Compute with the others: int32 bytes of starts [B], lengths [B], token ids [T], numbers of blocks [B], blocks
    [N], and one byte for each sequence that says whether its logits are needed, and one, whether its vector is [B]."""

    starts: bytes
    lengths: bytes
    token_ids: bytes
    num_blocks: bytes
    blocks: bytes
    samples: bytes
    pools: bytes


class IdleStep(msgspec.Struct, frozen=True, array_like=True, tag="idle_step", kw_only=True):
    """Compute for other ranks, without tokens."""


class CollectLoads(msgspec.Struct, frozen=True, array_like=True, tag="collect_loads", kw_only=True):
    """Add up with the others where tokens went."""


class Switch(msgspec.Struct, frozen=True, array_like=True, tag="switch", kw_only=True):
    """All ranks have copied their experts: use the new placement from now on."""


ToWorker = Allocate | Step | IdleStep | CollectLoads | Form | Forget | Begin | Abandon | MoveExperts | Switch | Vacate


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready", kw_only=True):
    """The process is up, and comes to the rank's group now."""


class ShareLoaded(msgspec.Struct, frozen=True, array_like=True, tag="share_loaded", kw_only=True):
    """The weights are in memory."""


class WorkerFailed(msgspec.Struct, frozen=True, array_like=True, tag="worker_failed", kw_only=True):
    """The worker ends. `permanent` if it would again."""

    message: str
    permanent: bool


FromWorker = Ready | ShareLoaded | WorkerFailed | Formed | Moved

_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_from_worker = msgspec.msgpack.Decoder(FromWorker)


def encode(message: ToWorker | FromWorker) -> bytes:
    return _encoder.encode(message)


def decode_to_worker(payload: bytes) -> ToWorker:
    return _to_worker.decode(payload)


def decode_from_worker(payload: bytes) -> FromWorker:
    return _from_worker.decode(payload)


def pack_step(inputs: Sequence[CausalInput]) -> Step:
    return Step(
        starts=np.array([each.start for each in inputs], dtype="<i4").tobytes(),
        lengths=np.array([each.token_ids.size for each in inputs], dtype="<i4").tobytes(),
        token_ids=np.concatenate([each.token_ids for each in inputs]).astype("<i4", copy=False).tobytes(),
        num_blocks=np.array([each.block_ids.size for each in inputs], dtype="<i4").tobytes(),
        blocks=np.concatenate([each.block_ids for each in inputs]).astype("<i4", copy=False).tobytes(),
        samples=bytes(each.sample is not None for each in inputs),
        pools=bytes(each.pooling is not None for each in inputs),
    )


def unpack_step(step: Step) -> list[CausalInput]:
    """The inputs without what only the leader needs: ids of sequences, how to sample, how to pool."""
    starts, lengths, num_blocks = (np.frombuffer(each, "<i4") for each in (step.starts, step.lengths, step.num_blocks))
    tokens = np.split(np.frombuffer(step.token_ids, "<i4"), np.cumsum(lengths)[:-1])
    blocks = np.split(np.frombuffer(step.blocks, "<i4"), np.cumsum(num_blocks)[:-1])
    return [
        CausalInput(
            seq_id=number,
            token_ids=tokens[number],
            start=start,
            block_ids=blocks[number],
            sample=_ASKED if step.samples[number] else None,
            pooling=_POOLED if step.pools[number] else None,
        )
        for number, start in enumerate(starts.tolist())
    ]
