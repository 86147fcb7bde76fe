"""What the HTTP process and a rank say to each other, as msgpack.

Owns the wire format. Arrays travel as raw little-endian bytes: int32 token ids and lengths, float32 vectors.
"""

from __future__ import annotations

import msgspec

from nobiru.generation import FinishReason, SampledToken, SamplingParams


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


class Generate(msgspec.Struct, frozen=True, array_like=True, tag="generate", kw_only=True):
    """Run one child of a generation request.

    `prompt` and `outputs` are int32 token ids: what it begins with, and what earlier attempts have brought already.
    """

    seq_id: int
    arrival: int
    age_s: float
    priority: int
    alone: bool
    child: int
    params: SamplingParams
    max_tokens: int
    stop_token_ids: list[int]
    prompt: bytes
    outputs: bytes


class Form(msgspec.Struct, frozen=True, array_like=True, tag="form", kw_only=True):
    """Build the groups of an attempt at `epoch` with its other members, as number `position` of `size`.

    The members meet at the store. `slots` (int32 bytes, of `shape` MoE layers, workers of all ranks, slots) says which
    expert is in which slot; -1 is an empty one. `fills` are, for each worker of the rank, (layer, expert, slot): to be
    read from the folder, by each no faster than `max_read_bytes_per_s`.
    """

    attempt: int
    epoch: int
    position: int
    size: int
    store_host: str
    store_port: int
    version: int
    shape: tuple[int, int, int]
    slots: bytes
    fills: list[list[tuple[int, int, int]]] = []
    leave: bool = False  # the epoch before is over: out of it first
    max_read_bytes_per_s: int | None = None


class Arm(msgspec.Struct, frozen=True, array_like=True, tag="arm", kw_only=True):
    """Announce that this rank is ready to leave its epoch for the attempt; park when all announce it."""

    attempt: int


class Forget(msgspec.Struct, frozen=True, array_like=True, tag="forget", kw_only=True):
    """Drop what was prepared for this attempt, and go on with the present epoch, also if parked."""

    attempt: int


class Begin(msgspec.Struct, frozen=True, array_like=True, tag="begin", kw_only=True):
    """Committed: every member has formed, and those of the epoch before have parked. Step in the new epoch."""

    attempt: int


class Wake(msgspec.Struct, frozen=True, array_like=True, tag="wake", kw_only=True):
    """Another member has work: take part in step `seq`, if that is the next."""

    epoch: int
    seq: int


class MoveExperts(msgspec.Struct, frozen=True, array_like=True, tag="move_experts", kw_only=True):
    """Copy experts beside serving, then use them from the step on in which all members have theirs.

    `moves` are (expert, from rank, from slot, to rank, to slot) by positions; `slots`, of `shape`, is the placement
    they lead to, number `version`, which differs from the present one in `layer`.
    """

    version: int
    layer: int
    moves: list[tuple[int, int, int, int, int]]
    shape: tuple[int, int, int]
    slots: bytes


class Vacate(msgspec.Struct, frozen=True, array_like=True, tag="vacate", kw_only=True):
    """All members use this placement: slots that are empty in it may be forgotten."""

    version: int


class Abandon(msgspec.Struct, frozen=True, array_like=True, tag="abandon", kw_only=True):
    """A member is gone: leave what belongs to this attempt. To the rank's control socket; it may be stuck in a step.

    Also from the leader of a rank, which has left the attempt's epoch, to its other workers.
    """

    attempt: int


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort", kw_only=True):
    """Forget these slices, or children by their `seq_id`: nobody waits for them any more."""

    slice_ids: list[int]


class Probe(msgspec.Struct, frozen=True, array_like=True, tag="probe", kw_only=True):
    """Run a small forward pass and say so."""

    nonce: int


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop", kw_only=True):
    """End."""


ToRank = Add | Generate | Form | Arm | Forget | Begin | Wake | MoveExperts | Vacate | Abandon | Abort | Probe | Stop


class Inventory(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The experts a rank holds: `slots` (int32 bytes, of `shape` MoE layers, workers, slots), -1 for an empty one."""

    num_experts: int
    expert_bytes: int
    stored_expert_bytes: int
    shape: tuple[int, int, int]
    slots: bytes


class MemoryUse(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a rank with a loaded model takes: `base_bytes` for all but experts and KV cache, which takes
    `kv_cache_bytes` once it is full, and could be as small as `least_kv_cache_bytes`; it was made from a share of the
    free memory, unless its size was asked for. The machine has `free_bytes` left."""

    base_bytes: int
    kv_cache_bytes: int = 0
    kv_cache_share: float | None = None
    least_kv_cache_bytes: int = 0
    free_bytes: int | None = None


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag="loaded", kw_only=True):
    """The model is loaded and warm. `info` says what for the start line: dtype, device, threads, limits.

    `memory` is not told where weights lie on a device. `worker_pids` are the process ids of the rank's workers, itself
    the first.
    """

    max_num_batched_tokens: int
    info: dict[str, str | int | float | bool | None]
    inventory: Inventory | None = None
    memory: MemoryUse | None = None
    worker_pids: list[int] = []


class StoreReady(msgspec.Struct, frozen=True, array_like=True, tag="store_ready", kw_only=True):
    """The rendezvous store can be reached."""

    host: str
    port: int


class StoreFailed(msgspec.Struct, frozen=True, array_like=True, tag="store_failed", kw_only=True):
    """The rendezvous store cannot be opened; it is tried again."""

    message: str


class Formed(msgspec.Struct, frozen=True, array_like=True, tag="formed", kw_only=True):
    """The groups of the attempt stand, and no step of an earlier epoch is running; or `error` says why they do not.

    With `missed_others` it is that others did not come, and no fault of this rank.
    """

    attempt: int
    error: str | None = None
    missed_others: bool = False


class Suspended(msgspec.Struct, frozen=True, array_like=True, tag="suspended", kw_only=True):
    """A collective failed: this rank has abandoned its step and left the epoch."""

    epoch: int
    error: str


class ExpertLoads(msgspec.Struct, frozen=True, array_like=True, tag="expert_loads", kw_only=True):
    """Tokens this rank routed to each expert in its last `num_steps` steps: int64 bytes, of `shape` layers, experts."""

    num_steps: int
    shape: tuple[int, int]
    counts: bytes


class Moved(msgspec.Struct, frozen=True, array_like=True, tag="moved", kw_only=True):
    """This rank's part of the moves is done: so many bytes came; or `error` says why not."""

    version: int
    num_bytes: int
    error: str | None = None


class Switched(msgspec.Struct, frozen=True, array_like=True, tag="switched", kw_only=True):
    """This rank uses the placement, from the step on in which all do."""

    version: int


class Parked(msgspec.Struct, frozen=True, array_like=True, tag="parked", kw_only=True):
    """All members are armed for this attempt: this rank waits before a step, its state intact."""

    attempt: int


class Applied(msgspec.Struct, frozen=True, array_like=True, tag="applied", kw_only=True):
    """The first gather of the attempt's epoch has completed on this rank."""

    attempt: int


class Awake(msgspec.Struct, frozen=True, array_like=True, tag="awake", kw_only=True):
    """This rank has work after all were idle, and waits for the others in step `seq`."""

    epoch: int
    seq: int


class StartFailed(msgspec.Struct, frozen=True, array_like=True, tag="start_failed", kw_only=True):
    """The rank cannot start; `permanent` when trying again would not help (a damaged folder, a wrong option)."""

    message: str
    permanent: bool


class Crashed(msgspec.Struct, frozen=True, array_like=True, tag="crashed", kw_only=True):
    """The rank ends because of an exception."""

    message: str


class Failure(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One sequence's error; `is_invalid` when the request itself is to blame."""

    index: int
    message: str
    code: str | None
    is_invalid: bool = False


class Generated(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """New tokens of a sequence; `first_index` is the output index of the first."""

    seq_id: int
    first_index: int
    tokens: list[SampledToken]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0


class EngineState(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The queues and the KV cache of a rank after a step.

    `num_preemptions`, `num_cached_tokens` and `num_prompt_tokens` count since the step before: sequences preempted, and
    of the prompts that began, the tokens found in the prefix cache and all tokens.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0


class StepDone(msgspec.Struct, frozen=True, array_like=True, tag="step_done", kw_only=True):
    """Results of one step.

    `seq_ids` (int64 bytes) are the sequences with an outcome. `vectors` holds their float32 vectors one after another,
    `vector_sizes` (int32 bytes) how many values each has: none for those with a `Failure`. `generated` are the tokens
    of sequences that generate text; those have a place in `seq_ids` only when they fail.
    """

    seq_ids: bytes
    vector_sizes: bytes
    vectors: bytes
    failures: list[Failure]
    generated: list[Generated]
    state: EngineState | None
    queue_s: list[float]
    num_sequences: int
    num_tokens: int
    compute_s: float


class Idle(msgspec.Struct, frozen=True, array_like=True, tag="idle", kw_only=True):
    """There is no work any more, because what was left was aborted."""

    state: EngineState


class ProbeDone(msgspec.Struct, frozen=True, array_like=True, tag="probe_done", kw_only=True):
    """The forward pass of a probe has ended."""

    nonce: int


FromRank = (
    Loaded
    | StartFailed
    | Crashed
    | StoreReady
    | StoreFailed
    | Formed
    | Suspended
    | Parked
    | Applied
    | Awake
    | ExpertLoads
    | Moved
    | Switched
    | StepDone
    | Idle
    | ProbeDone
)

_encoder = msgspec.msgpack.Encoder()
_to_rank = msgspec.msgpack.Decoder(ToRank)
_from_rank = msgspec.msgpack.Decoder(FromRank)


def encode(message: ToRank | FromRank) -> bytes:
    return _encoder.encode(message)


def decode_to_rank(data: bytes) -> ToRank:
    return _to_rank.decode(data)


def decode_from_rank(data: bytes) -> FromRank:
    return _from_rank.decode(data)
