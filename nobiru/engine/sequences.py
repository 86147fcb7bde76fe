"""Requests as the scheduler's sequences. Used by `LLM` and by a rank process, so that both run the same thing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nobiru.generation import GenerationInput, SamplingParams
from nobiru.request import SequenceInput
from nobiru.scheduler import CausalState
from nobiru.scheduler import Sequence as ScheduledSequence


def embedding_sequence(
    payload: SequenceInput,
    *,
    is_causal: bool,
    seq_id: int,
    arrival: int,
    arrival_s: float,
    priority: int = 0,
    alone: bool = False,
) -> ScheduledSequence:
    """A text to be embedded. A causal model takes it over its KV cache, where texts share their beginnings."""
    num_tokens = payload.token_ids.size
    state = None
    if is_causal:
        tokens = payload.token_ids.tolist()
        state = CausalState(token_ids=tokens, num_prompt_tokens=num_tokens, max_num_tokens=num_tokens)
    return ScheduledSequence(
        seq_id=seq_id,
        num_tokens=num_tokens,
        arrival=arrival,
        arrival_s=arrival_s,
        priority=priority,
        alone=alone,
        payload=payload,
        causal=state,
    )


def generation_sequence(
    params: SamplingParams,
    *,
    child: int,
    prompt: Sequence[int],
    outputs: Sequence[int] = (),
    max_tokens: int,
    stop_token_ids: Iterable[int],
    seq_id: int,
    arrival: int,
    arrival_s: float,
    alone: bool = False,
) -> ScheduledSequence:
    """A text to be generated; `outputs` are its tokens so far, if it began on another rank."""
    state = CausalState(
        token_ids=[*prompt, *outputs],
        num_prompt_tokens=len(prompt),
        max_num_tokens=len(prompt) + max_tokens,
        min_num_tokens=len(prompt) + params.min_tokens,
        stop_token_ids=frozenset(stop_token_ids),
        cache_salt=params.cache_salt,
    )
    return ScheduledSequence(
        seq_id=seq_id,
        num_tokens=len(state.token_ids),
        arrival=arrival,
        arrival_s=arrival_s,
        priority=params.priority,
        alone=alone,
        payload=GenerationInput(params=params, child=child),
        causal=state,
    )
