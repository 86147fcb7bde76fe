"""The values that describe one piece of text generation, from the caller's options to what a rank gives back.

Plain data: no torch, no I/O. A request has `n` *children*, one for each text asked for; each child is one sequence.
Shape legend: t tokens of a sequence in one step, b KV blocks of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from nobiru.errors import InvalidRequestError
from nobiru.request import SequenceInput, TokenIds

FinishReason = Literal["stop", "length"]

MAX_CHILDREN = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_SEED = 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen and when a text ends.

    `temperature` 0 is greedy. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 leave all tokens in. `repetition_penalty` looks
    at prompt and output, `presence_penalty` and `frequency_penalty` at the output. `seed` None takes a random one; with
    a seed, a text depends on nothing else but model, prompt and options. `max_tokens` None means up to the model's
    limit. Stop token ids and end-of-text tokens do not end a text before `min_tokens`. `logprobs` k gives the chosen
    token's log-probability and those of the k most likely ones, before penalties and temperature. `logit_bias` is
    added to the logits of token ids. `json_schema` is a JSON schema, as JSON text, that the text will conform to ("{}"
    for any JSON value). `cache_salt` keeps prefix caching among requests with the same salt. Lower `priority` values
    are served first.

    Raises `InvalidRequestError` that names the field.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    logit_bias: dict[int, float] = {}
    json_schema: str | None = None
    cache_salt: str = ""
    priority: int = 0

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_CHILDREN)
        _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _wrong("min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, least_excluded=True)
        _integer("top_k", self.top_k, -1)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, least_excluded=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) and text for text in self.stop):
            raise _wrong("stop", self.stop, "a tuple of texts that are not empty")
        if len(self.stop) > MAX_STOPS:
            raise _wrong("stop", f"{len(self.stop)} texts", f"at most {MAX_STOPS}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One request as the engine takes it, everything resolved.

    `params.seed` is set; `max_tokens` is what each child may generate; `stop_token_ids` end a text after
    `params.min_tokens` tokens: those asked for, and the model's own unless `ignore_eos`.
    """

    request_id: str
    prompt_token_ids: TokenIds
    params: SamplingParams
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """A chosen token. With `logprobs` k: its own log-probability, and `top`, the k most likely ones, best first."""

    token_id: int
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None


class GenerationDelta(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What one child has got since the last delta.

    `first_index` is the output index of the first of `tokens`. The last delta of a child has a `finish_reason`;
    `stop_token_id` is the token that ended it, which is the last of `tokens`. `num_cached_tokens` of the prompt were
    found in the prefix cache.
    """

    child: int
    first_index: int
    tokens: list[SampledToken]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0


# ---- what a runner takes ---------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True, eq=False)
class GenerationInput:
    """A child's options, with `params.seed` set. `sampler_state` is where the sampler keeps what it derives."""

    params: SamplingParams
    child: int = 0
    sampler_state: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """Asks for the token behind a sequence's last one.

    It is output number `len(output_token_ids)`. `prompt_token_ids` are given where a penalty looks at them, and may be
    empty otherwise. `forbidden_token_ids` may not be chosen (stop tokens, while there are
    fewer than `min_tokens`).
    """

    input: GenerationInput
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    forbidden_token_ids: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CausalInput:
    """A sequence's part of one step: `token_ids` [t] at positions `start`, `start` + 1, ….

    Keys and values of the positions before are in the KV cache, those of these tokens are to be put there; `block_ids`
    [b] are the sequence's blocks in order, enough for all of them. With `sample` the last token's logits give a new
    token, with `pooling` its hidden state gives the vector; with neither the step only fills the cache.
    """

    seq_id: int
    token_ids: TokenIds
    start: int
    block_ids: TokenIds
    sample: SampleRequest | None = None
    pooling: SequenceInput | None = None


# ---- what callers get ------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class CompletionOutput:
    """One text. `stop_reason` is the stop string or stop token id that ended it, None for the model's end of text.

    `logprobs` has one entry per token when asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[SampledToken] | None = None


@dataclass(kw_only=True, slots=True)
class RequestOutput:
    """What `LLM.generate` returns for one prompt: `n` texts, in the order of their children."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    num_cached_tokens: int = 0


def _wrong(name: str, value: object, must_be: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is {value!r}; it must be {must_be}", param=name)


def _integer(name: str, value: object, least: int, most: int | None = None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise _wrong(name, value, f"an integer {bounds}")


def _number(name: str, value: object, least: float, most: float, *, least_excluded: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _wrong(name, value, "a number")
    if value > most or value < least or (least_excluded and value == least):
        bounds = f"above {least:g} and at most {most:g}" if least_excluded else f"from {least:g} to {most:g}"
        raise _wrong(name, value, bounds)
