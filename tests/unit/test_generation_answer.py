"""What log-probabilities look like where tokens are no characters or have no finite number."""

from __future__ import annotations

import math

import msgspec
from small_tokenizers import small_tokenizer
from tokenizers import decoders

from nobiru.frontend.token_texts import TokenTexts
from nobiru.generation import SampledToken
from nobiru.serving.logprobs import LEAST_LOGPROB, chat_logprobs, completion_logprobs

_TOKENIZER = small_tokenizer("byte_bpe")
_TOKENIZER.decoder = decoders.ByteLevel()
TEXTS = TokenTexts(_TOKENIZER)
IDS = {TEXTS.bytes_of(token): token for token in range(_TOKENIZER.get_vocab_size())}


def test_parts_of_characters_are_written_as_bytes() -> None:
    first, second = (IDS[bytes([byte])] for byte in "é".encode())
    tokens = [SampledToken(first, -1.0, [(first, -1.0), (second, -2.0)]), SampledToken(IDS[b"a"], -0.5, [])]
    found = completion_logprobs(tokens, TEXTS, 10)
    assert found.tokens == ["bytes:\\xc3", "a"]
    assert found.top_logprobs == [{"bytes:\\xc3": -1.0, "bytes:\\xa9": -2.0}, {"a": -0.5}]
    assert found.text_offset == [10, 11]
    entry = chat_logprobs(tokens, TEXTS).content[0]
    assert (entry.token, entry.bytes) == ("bytes:\\xc3", [0xC3])
    assert [other.bytes for other in entry.top_logprobs] == [[0xC3], [0xA9]]


def test_what_json_cannot_hold() -> None:
    tokens = [SampledToken(IDS[b"a"], -math.inf, [(IDS[b"b"], -math.inf)])]
    content = msgspec.json.decode(msgspec.json.encode(chat_logprobs(tokens, TEXTS)))["content"]
    assert content[0]["logprob"] == LEAST_LOGPROB
    assert content[0]["top_logprobs"][0]["logprob"] == LEAST_LOGPROB
    assert completion_logprobs(tokens, TEXTS, 0).token_logprobs == [LEAST_LOGPROB]
