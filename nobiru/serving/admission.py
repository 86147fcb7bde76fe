"""Which requests are taken: whole ones, by the tokens that wait before them.

Owns the count of accepted requests and of tokens reserved for requests that are still being tokenized. Decides purely:
it reads the engine's counters, has no clock and does no I/O.
"""

from __future__ import annotations

import math

from nobiru.errors import OverloadedError, UnavailableError
from nobiru.serving.protocols import QueueView

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 600.0
# Until a first step has been measured; loading a model takes about as long.
UNMEASURED_RETRY_AFTER_S = 5.0
# About what a replacement of this server needs to be ready.
DRAIN_RETRY_AFTER_S = 5.0
# A text has at least one token, and in most languages a token is about four characters.
CHARACTERS_PER_TOKEN = 4
MAX_ESTIMATED_OUTPUT = 256


class Ticket:
    """An accepted request, from its admission until its answer has been sent."""

    __slots__ = ("_admission", "_num_reserved")

    def __init__(self, admission: Admission, num_reserved: int) -> None:
        self._admission = admission
        self._num_reserved = num_reserved

    def release_reservation(self) -> None:
        """From here on the engine counts the request's tokens itself."""
        self._admission.num_reserved_tokens -= self._num_reserved
        self._num_reserved = 0

    def close(self) -> None:
        """The request has had its one outcome. To be called once."""
        self.release_reservation()
        self._admission.num_accepted -= 1


class Admission:
    """`admit` takes a request or raises. `draining`, once set, refuses all new work."""

    def __init__(self, queue: QueueView, *, max_queued_tokens: int) -> None:
        self._queue = queue
        self._max_queued_tokens = max_queued_tokens
        self.num_reserved_tokens = 0
        self.num_accepted = 0
        self.draining = False

    def admit(self, num_estimated_tokens: int) -> Ticket:
        """Accept a request of about that many tokens.

        Its own size does not count, only what already waits: a request larger than the limit is served when the queue
        is short. Raises `OverloadedError` or `UnavailableError`.
        """
        if self.draining:
            raise UnavailableError(
                "the server is shutting down and takes no new requests; send it to another one or try again later",
                retry_after_s=DRAIN_RETRY_AFTER_S,
            )
        num_queued = self._queue.queued_tokens + self.num_reserved_tokens
        if num_queued > self._max_queued_tokens:
            raise OverloadedError(
                f"{num_queued} tokens are already queued, more than max_queued_tokens = {self._max_queued_tokens}; "
                "try again after the time in Retry-After",
                retry_after_s=self._retry_after_s(num_queued - self._max_queued_tokens),
            )
        self.num_reserved_tokens += num_estimated_tokens
        self.num_accepted += 1
        return Ticket(self, num_estimated_tokens)

    def estimated_wait_s(self) -> float:
        """How long a request that arrives now waits; 0 until a throughput has been measured."""
        tokens_per_s = self._queue.tokens_per_s
        return (self._queue.queued_tokens + self.num_reserved_tokens) / tokens_per_s if tokens_per_s else 0.0

    def _retry_after_s(self, num_excess_tokens: int) -> float:
        """When the queue will have shrunk to its limit."""
        tokens_per_s = self._queue.tokens_per_s
        if not tokens_per_s:
            return UNMEASURED_RETRY_AFTER_S
        return min(max(float(math.ceil(num_excess_tokens / tokens_per_s)), MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)


def estimate_generation(
    *, num_characters: int, num_token_ids: int = 0, num_texts: int, max_tokens: int, max_model_len: int
) -> int:
    """A guess for one prompt and its texts. Few texts get as long as they may, so their part is bounded."""
    num_prompt = min(estimate_tokens(1, num_characters) + num_token_ids, max_model_len)
    return num_prompt + num_texts * min(max_tokens, MAX_ESTIMATED_OUTPUT, max_model_len)


def estimate_tokens(num_texts: int, num_characters: int) -> int:
    """A guess before tokenization; short texts still cost their special tokens."""
    return 2 * num_texts + num_characters // CHARACTERS_PER_TOKEN
