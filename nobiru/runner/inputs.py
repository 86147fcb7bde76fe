"""What a plan asks of a runner: one input for each part, copied out of the scheduler's state.

Owns the step from the scheduler's numbers to arrays. The copies let the next step be planned while this one runs.
"""

from __future__ import annotations

import numpy as np

from nobiru.generation import CausalInput, GenerationInput, SampleRequest
from nobiru.request import SequenceInput
from nobiru.scheduler.plan import CausalState, Part, Plan

Input = SequenceInput | CausalInput


def inputs_of(plan: Plan) -> list[Input]:
    """In the order of the plan's parts."""
    return [_input(part) for part in plan.parts]


def _input(part: Part) -> Input:
    state, payload = part.sequence.causal, part.sequence.payload
    if state is None:
        assert isinstance(payload, SequenceInput)
        return payload
    return CausalInput(
        seq_id=part.sequence.seq_id,
        token_ids=np.array(state.token_ids[part.start : part.start + part.num_tokens], dtype=np.int32),
        start=part.start,
        block_ids=np.array(state.block_ids, dtype=np.int32),
        sample=_sample(payload, state) if part.is_last and isinstance(payload, GenerationInput) else None,
        pooling=payload if part.is_last and isinstance(payload, SequenceInput) else None,
    )


def _sample(payload: GenerationInput, state: CausalState) -> SampleRequest:
    may_end = len(state.token_ids) + 1 >= state.min_num_tokens
    return SampleRequest(
        input=payload,
        prompt_token_ids=state.token_ids[: state.num_prompt_tokens] if payload.params.has_penalties else (),
        output_token_ids=state.token_ids[state.num_prompt_tokens :],
        forbidden_token_ids=() if may_end else tuple(state.stop_token_ids),
    )
