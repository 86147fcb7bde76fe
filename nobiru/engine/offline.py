"""Generation requests run to their end in the caller's process.

Owns the way of a request's children through the step loop, and what becomes of their tokens. `LLM` uses it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from nobiru.engine.core import EngineCore
from nobiru.engine.sequences import generation_sequence
from nobiru.errors import NobiruError
from nobiru.frontend.text_stream import TextStream
from nobiru.generation import (
    CompletionOutput,
    FinishReason,
    GenerationDelta,
    GenerationRequest,
    RequestOutput,
    SampledToken,
)
from nobiru.scheduler import Sequence as ScheduledSequence


class GenerationRun:
    """`requests` with the texts of their prompts (None for token ids) and a `TextStream` for each child.

    Sequences get ids from `first_id` to before `end_id`. `outputs` may be called once.
    """

    def __init__(
        self,
        core: EngineCore,
        requests: Sequence[GenerationRequest],
        texts: Sequence[str | None],
        streams: Sequence[Sequence[TextStream]],
        *,
        first_id: int,
    ) -> None:
        self._core = core
        self._requests = requests
        self._streams = streams
        self._places = [(number, child) for number, each in enumerate(requests) for child in range(each.params.n)]
        self._first_id = first_id
        self.num_sequences = len(self._places)
        self.end_id = first_id + self.num_sequences
        self._outputs = [_empty_output(request, text) for request, text in zip(requests, texts, strict=True)]
        self._waiting: dict[int, list[ScheduledSequence]] = {}
        self._num_left = self.num_sequences

    def outputs(self, advance: Callable[[int, int], None]) -> list[RequestOutput]:
        """Step until all children have ended; `advance` hears of (children ended, new tokens) after each step.

        Raises a prompt's error; what others have got is lost then.
        """
        try:
            self._core.add(self._first_children())
            while self._num_left:
                output = self._core.step()
                assert output is not None, "there is work left"
                num_left, num_tokens = self._num_left, 0
                for sequence, outcome in zip(output.sequences, output.outcomes, strict=True):
                    if isinstance(outcome, NobiruError):
                        outcome.param = f"prompts[{self._places[sequence.seq_id - self._first_id][0]}]"
                        raise outcome
                    num_tokens += 1
                    self._push(sequence, cast(SampledToken, outcome))
                advance(num_left - self._num_left, num_tokens)
        except BaseException:
            self._core.abort(range(self._first_id, self.end_id))
            raise
        return self._outputs

    def _first_children(self) -> Iterable[ScheduledSequence]:
        """The others of a request follow when the first has its first token: they find its prompt in the cache."""
        now_s = time.monotonic()
        for index, (number, child) in enumerate(self._places):
            request, seq_id = self._requests[number], self._first_id + index
            sequence = generation_sequence(
                request.params,
                child=child,
                prompt=request.prompt_token_ids.tolist(),
                max_tokens=request.max_tokens,
                stop_token_ids=request.stop_token_ids,
                seq_id=seq_id,
                arrival=seq_id,
                arrival_s=now_s,
            )
            if child:
                self._waiting.setdefault(seq_id - child, []).append(sequence)
            else:
                yield sequence

    def _push(self, sequence: ScheduledSequence, token: SampledToken) -> None:
        self._core.add(self._waiting.pop(sequence.seq_id, ()))
        number, child = self._places[sequence.seq_id - self._first_id]
        state, request = sequence.causal, self._outputs[number]
        assert state is not None
        text = self._streams[number][child].push(
            GenerationDelta(
                child=child,
                first_index=state.num_outputs - 1,
                tokens=[token],
                finish_reason=cast("FinishReason | None", state.finish_reason),
                stop_token_id=token.token_id if state.finish_reason == "stop" else None,
                num_cached_tokens=state.num_cached_tokens or 0,
            )
        )
        output = request.outputs[child]
        output.text += text.text
        output.token_ids += text.token_ids
        if output.logprobs is not None:
            output.logprobs += text.tokens
        if not child:
            request.num_cached_tokens = text.num_cached_tokens
        if text.finish_reason is not None:
            output.finish_reason, output.stop_reason = text.finish_reason, text.stop_reason
            self._num_left -= 1
            if text.stopped_early:
                self._core.abort([sequence.seq_id])


def _empty_output(request: GenerationRequest, text: str | None) -> RequestOutput:
    children = [
        CompletionOutput(index=child, text="", token_ids=[], logprobs=None if request.params.logprobs is None else [])
        for child in range(request.params.n)
    ]
    return RequestOutput(prompt=text, prompt_token_ids=request.prompt_token_ids.tolist(), outputs=children)
