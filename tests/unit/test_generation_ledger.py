"""The ledger of generation requests: whatever ranks and clients do, every token is delivered once and in order."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nobiru.engine.generation_ledger import GenerationEntry, GenerationLedger
from nobiru.engine.ledger import DEATHS_UNTIL_FAILED
from nobiru.engine.messages import Failure, Generate, Generated
from nobiru.errors import InferenceError, InvalidRequestError, RequestKilledRankError
from nobiru.generation import GenerationRequest, SampledToken, SamplingParams

STOP = 9


def request(number: int, *, n: int = 1, max_tokens: int = 5, prompt_tokens: int = 3) -> GenerationRequest:
    return GenerationRequest(
        request_id=str(number),
        prompt_token_ids=np.full(prompt_tokens, number, dtype=np.int32),
        params=SamplingParams(n=n, seed=1),
        max_tokens=max_tokens,
        stop_token_ids=(STOP,),
    )


def text_of(number: int, child: int, max_tokens: int) -> list[int]:
    """What the pretended model writes for a child; some end early."""
    tokens = [(number * 31 + child * 7 + index * index) % 11 for index in range(max_tokens)]
    return tokens[: tokens.index(STOP) + 1] if STOP in tokens else tokens


@dataclass
class Rank:
    """Generates what it was sent, a token at a time."""

    rank_id: str
    work: dict[int, tuple[Generate, list[int]]] = field(default_factory=dict)

    def take(self, message: Generate) -> None:
        outputs = np.frombuffer(message.outputs, dtype="<i4").tolist()
        self.work[message.seq_id] = (message, outputs)

    def step(self, chosen: list[int]) -> list[Generated]:
        results = []
        for seq_id in chosen:
            message, outputs = self.work[seq_id]
            number = int(np.frombuffer(message.prompt, dtype="<i4")[0])
            text = text_of(number, message.child, message.max_tokens)
            outputs.append(text[len(outputs)])
            reason = None
            if len(outputs) == len(text):
                reason = "stop" if text[-1] == STOP else "length"
                del self.work[seq_id]
            results.append(
                Generated(
                    seq_id=seq_id,
                    first_index=len(outputs) - 1,
                    tokens=[SampledToken(outputs[-1])],
                    finish_reason=reason,  # type: ignore[arg-type]
                )
            )
        return results


class Play:
    """A ledger, its clients, and a rank that is replaced whenever it dies."""

    def __init__(self, chance: random.Random, num_requests: int) -> None:
        self.chance = chance
        self.ledger = GenerationLedger(itertools.count())
        self.entries: dict[GenerationEntry, int] = {}
        self.received: dict[tuple[int, int], list[int]] = {}
        self.finished: set[tuple[int, int]] = set()
        self.ended: set[int] = set()
        self.late: list[Generated] = []
        self.waiting = list(range(num_requests))
        self.requests = [
            request(number, n=chance.choice([1, 1, 3]), max_tokens=chance.randint(1, 6)) for number in self.waiting
        ]
        self.ids = itertools.count()
        self.rank = Rank(f"r{next(self.ids)}")

    def deliver(self, results: list[Generated]) -> None:
        for entry, delta in self.ledger.apply(results):
            place = (self.entries[entry], delta.child)
            assert place not in self.finished and place[0] not in self.ended
            text = self.received.setdefault(place, [])
            assert delta.first_index == len(text)
            text += [token.token_id for token in delta.tokens]
            if delta.finish_reason is not None:
                self.finished.add(place)
                assert (delta.stop_token_id == STOP) == (delta.finish_reason == "stop")

    def abort(self, aborts: dict[str, list[int]]) -> None:
        for seq_id in aborts.get(self.rank.rank_id, ()):
            self.rank.work.pop(seq_id, None)

    def open_next(self) -> None:
        number = self.waiting.pop(0)
        self.entries[self.ledger.open(self.requests[number], 0.0)] = number

    def rank_dies(self) -> None:
        executing = [seq_id for seq_id in self.rank.work if self.chance.random() < 0.2]
        self.late += self.rank.step(list(self.rank.work))  # was on its way when the rank died
        for entry in self.ledger.rank_lost(self.rank.rank_id, executing):
            assert isinstance(entry.error, RequestKilledRankError)
            self.ended.add(self.entries[entry])
        self.rank = Rank(f"r{next(self.ids)}")

    def client_leaves(self, entry: GenerationEntry) -> None:
        self.abort(self.ledger.cancel(entry))
        self.ended.add(self.entries[entry])

    def client_stops(self, entry: GenerationEntry) -> None:
        child = self.chance.randrange(entry.request.params.n)
        self.abort(self.ledger.stop(entry, child))
        self.finished.add((self.entries[entry], child))

    def send(self) -> None:
        for child in self.ledger.unsent():
            self.ledger.sent(child, self.rank.rank_id)
            self.rank.take(child.message(1.0))

    def event(self) -> None:
        kind = self.chance.random()
        living = [entry for entry, number in self.entries.items() if number not in self.ended and not entry.has_ended]
        if self.waiting and kind < 0.2:
            self.open_next()
        elif kind < 0.25:
            self.rank_dies()
        elif kind < 0.28 and living:
            self.client_leaves(self.chance.choice(living))
        elif kind < 0.31 and living:
            self.client_stops(self.chance.choice(living))
        elif kind < 0.35:
            self.deliver(self.late)
            self.late.clear()
        else:
            self.deliver(self.rank.step([seq_id for seq_id in self.rank.work if self.chance.random() < 0.7]))
        self.send()

    def run_to_the_end(self) -> None:
        while self.ledger.entries or self.waiting:
            if self.waiting:
                self.open_next()
            self.send()
            self.deliver(self.rank.step(list(self.rank.work)))
        self.deliver(self.late)


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 6))
def test_whatever_happens_every_token_comes_once_and_in_order(chance: random.Random, num_requests: int) -> None:
    play = Play(chance, num_requests)
    for _ in range(400):
        play.event()
    play.run_to_the_end()
    assert play.ledger.num_tokens == 0
    assert not any(play.ledger.tokens_on.values())
    assert not play.rank.work, "what nobody waits for was aborted"
    for (number, child), text in play.received.items():
        whole = text_of(number, child, play.requests[number].max_tokens)
        assert text == whole[: len(text)]
    for entry, number in play.entries.items():
        assert entry.has_ended or number in play.ended
        if number not in play.ended:
            assert all((number, child) in play.finished for child in range(play.requests[number].params.n))


def sent(ledger: GenerationLedger, rank_id: str = "r0") -> list[Generate]:
    messages = []
    for child in ledger.unsent():
        ledger.sent(child, rank_id)
        messages.append(child.message(5.0))
    return messages


def token(message: Generate, index: int, token_id: int = 1) -> Generated:
    return Generated(seq_id=message.seq_id, first_index=index, tokens=[SampledToken(token_id)])


def test_the_other_children_follow_the_first_token_so_that_they_share_the_prompt() -> None:
    ledger = GenerationLedger(itertools.count())
    ledger.open(request(1, n=3), 0.0)
    (first,) = sent(ledger)
    assert first.child == 0
    assert ledger.num_tokens == 9
    ledger.apply([token(first, 0)])
    assert [message.child for message in sent(ledger)] == [1, 2]
    assert ledger.num_tokens == 6


def test_what_runs_again_takes_its_tokens_along_and_keeps_its_turn() -> None:
    ledger = GenerationLedger(itertools.count())
    ledger.open(request(1), 2.0)
    (first,) = sent(ledger)
    ledger.apply([token(first, 0, 4), token(first, 1, 5)])
    assert ledger.rank_lost("r0", []) == []
    (again,) = sent(ledger, "r1")
    assert again.seq_id != first.seq_id
    assert again.arrival == first.arrival
    assert again.age_s == 3.0
    assert np.frombuffer(again.outputs, dtype="<i4").tolist() == [4, 5]
    assert ledger.apply([token(first, 2)]) == [], "the attempt before is over"


def test_a_request_that_keeps_killing_ranks_runs_alone_and_then_fails() -> None:
    ledger = GenerationLedger(itertools.count())
    entry = ledger.open(request(1), 0.0)
    for death in range(DEATHS_UNTIL_FAILED):
        (message,) = sent(ledger, f"r{death}")
        assert message.alone == (death == DEATHS_UNTIL_FAILED - 1)
        ended = ledger.rank_lost(f"r{death}", [message.seq_id])
        assert ended == ([entry] if message.alone else [])
    assert isinstance(entry.error, RequestKilledRankError)
    assert not ledger.entries
    assert ledger.num_tokens == 0


def test_a_failure_ends_the_request_with_the_right_blame() -> None:
    for is_invalid, kind in ((True, InvalidRequestError), (False, InferenceError)):
        ledger = GenerationLedger(itertools.count())
        entry = ledger.open(request(1, n=2), 0.0)
        (message,) = sent(ledger)
        failure = Failure(index=0, message="no", code="x", is_invalid=is_invalid)
        assert ledger.fail(message.seq_id, failure) is entry
        assert type(entry.error) is kind
        assert ledger.cancel(entry) == {}
        assert ledger.num_tokens == 0
