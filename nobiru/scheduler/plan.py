"""The values the scheduler takes and gives: sequences waiting for their step, and the plan of one step."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False, kw_only=True)
class CausalState:
    """What a sequence has beside, if it runs over the KV cache; only `Scheduler.update` advances it.

    `token_ids` are prompt and output. Keys and values of the first `num_computed_tokens` are in the cache, in
    `block_ids`; those of `num_in_flight_tokens` more are being computed. The sequence ends with `max_num_tokens`
    tokens, or, from `min_num_tokens` on, with one of `stop_token_ids`. With `max_num_tokens` equal to the prompt's
    length nothing is generated: the sequence ends with its prefill (an embedding). `num_cached_tokens` were found in
    the prefix cache when the sequence first ran. `num_preemptions` counts how often its blocks were taken away.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    max_num_tokens: int
    min_num_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    cache_salt: str = ""
    block_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_published_blocks: int = 0
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    finish_reason: str | None = None

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def generates(self) -> bool:
        return self.max_num_tokens > self.num_prompt_tokens


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One sequence in the scheduler's hands; it looks at these numbers and never at `payload`.

    `seq_id` is unique. `num_tokens` is the number of tokens at arrival. `arrival` orders sequences of equal priority
    and is unique too; a sequence that runs again after a failure keeps its own. `arrival_s` is the clock's time at
    arrival (seconds). `alone` asks for steps without company, because the sequence is suspected of killing ranks.
    `causal` is None for encoders, whose sequences run whole, in one step. `has_run` is the step loop's note that the
    sequence has been in a step.
    """

    seq_id: int
    num_tokens: int
    arrival: int
    arrival_s: float
    priority: int = 0
    alone: bool = False
    payload: object = None
    has_run: bool = False
    causal: CausalState | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A sequence's tokens in one step: `num_tokens` of them from position `start` on.

    `is_last` says that no known token is left behind them: the step gives the sequence's next token, or its vector.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The parts of one step, in order of service."""

    parts: tuple[Part, ...]
    num_tokens: int

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        return tuple(part.sequence for part in self.parts)
