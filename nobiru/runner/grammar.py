"""Guided generation: JSON schemas become grammars over a folder's tokens, and grammars say which tokens may come next.

Owns the optional library xgrammar (Dong et al., "XGrammar: Flexible and Efficient Structured Generation Engine for
Large Language Models", 2024), imported when the first schema arrives. Knows nothing of logits; which schemas are
accepted at all is `nobiru.guided`'s.

Shape legend: W words of 32 bits, one bit per token of the vocabulary.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from nobiru.errors import InferenceError, InvalidRequestError, UnavailableError
from nobiru.folder.spec import ModelFolder
from nobiru.guided import check_schema

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler

MAX_GRAMMARS = 256
MAX_GRAMMAR_BYTES = 256 * 2**20
# A text may hold so many spaces and line ends in a row between JSON's tokens: enough for deep indentation, and an end
# for models that go on with spaces.
MAX_WHITESPACE = 32
# The step waits for a new grammar; nearly all take milliseconds.
MAX_COMPILE_S = 5.0

_SOURCE_LINE = re.compile(r"^\[[^\]]*\] \S+?:\d+: ")

_CONTROL_BYTES = frozenset(range(0x20)) - frozenset(b"\n\r")

Words = NDArray[np.int32]


class Grammars:
    """The grammars of one model, compiled when first asked for; the latest ones are kept."""

    def __init__(self, folder: ModelFolder, vocab_size: int) -> None:
        eos_token_ids = folder.generation.eos_token_ids if folder.generation else ()
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size)
        self._compiler: GrammarCompiler | None = None
        self._compiled: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._compiling: threading.Thread | None = None

    @property
    def num_words(self) -> int:
        """W, the words of a mask."""
        return -(-self._vocab_size // 32)

    def matcher(self, schema: str) -> GrammarMatcher:
        """A matcher at the beginning of a text.

        `InvalidRequestError` for a schema that cannot be honoured, a missing library, or a model whose tokens cannot
        be guided; `UnavailableError` while a schema that took too long is still being compiled.
        """
        compiled = self.compile(schema)
        from xgrammar import GrammarMatcher as Library  # an optional dependency, as below

        return GrammarMatcher(Library(compiled), self._eos_token_ids, self.num_words)

    def compile(self, schema: str) -> CompiledGrammar:
        """The grammar of a schema; raises as `matcher` does."""
        if (known := self._compiled.get(schema)) is not None:
            self._compiled.move_to_end(schema)
            return known
        check_schema(schema)
        compiled = self._compiled[schema] = self._compile_in_time(schema)
        sizes = {text: grammar.memory_size_bytes for text, grammar in self._compiled.items()}
        while len(self._compiled) > 1 and (len(sizes) > MAX_GRAMMARS or sum(sizes.values()) > MAX_GRAMMAR_BYTES):
            oldest, _ = self._compiled.popitem(last=False)
            del sizes[oldest]
        return compiled

    def _compile_in_time(self, schema: str) -> CompiledGrammar:
        """The library has no limit of its own, so a thread compiles, and is left behind if it takes too long."""
        if self._compiling is not None and self._compiling.is_alive():
            raise UnavailableError("an earlier json_schema is still being compiled; try again later", retry_after_s=5.0)
        compiler = self._make_compiler()
        results: list[CompiledGrammar | Exception] = []

        def compile_schema() -> None:
            try:
                results.append(compiler.compile_json_schema(schema, max_whitespace_cnt=MAX_WHITESPACE))
            except Exception as error:
                results.append(error)

        self._compiling = threading.Thread(target=compile_schema, name="grammar", daemon=True)
        self._compiling.start()
        self._compiling.join(MAX_COMPILE_S)
        if not results:
            _refuse(f"json_schema takes more than {MAX_COMPILE_S:g} s to prepare; make it simpler")
        if isinstance(result := results[0], Exception):
            message = _SOURCE_LINE.sub("", str(result)).strip()
            raise InvalidRequestError(f"json_schema cannot be honoured: {message}", param="json_schema") from result
        return result

    def _make_compiler(self) -> GrammarCompiler:
        if self._compiler is None:
            from xgrammar import GrammarCompiler, TokenizerInfo, VocabType

            if not self._eos_token_ids:
                _refuse("json_schema needs a model with an end-of-text token, and this folder names none")
            tokens, is_byte_level = read_vocabulary(self._folder, self._vocab_size)
            kind = VocabType.BYTE_LEVEL if is_byte_level else VocabType.BYTE_FALLBACK
            stops = list(self._eos_token_ids)
            # JSON does without them, but strings with a maxLength get them from the library.
            for token_id, read in enumerate(TokenizerInfo(tokens, kind, stop_token_ids=stops).decoded_vocab):
                if not _CONTROL_BYTES.isdisjoint(read):
                    tokens[token_id] = ""
            info = TokenizerInfo(tokens, kind, stop_token_ids=stops)
            self._compiler = GrammarCompiler(
                info, max_threads=1, cache_limit_bytes=MAX_GRAMMAR_BYTES, enable_dynamic_compilation=True
            )
        return self._compiler


class GrammarMatcher:
    """One text's place in its grammar."""

    def __init__(self, matcher: Any, eos_token_ids: Sequence[int], num_words: int) -> None:
        self._matcher = matcher
        self._eos_mask_W = _mask_of(eos_token_ids, num_words)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Go on by tokens of the output. `InferenceError` for a token that the grammar does not allow there."""
        for token_id in token_ids:
            if self._matcher.is_terminated():
                return
            if not self._matcher.accept_token(token_id):
                raise InferenceError(f"the output holds token {token_id}, which json_schema does not allow there")

    def fill(self, words_W: Words, forbidden_token_ids: Sequence[int]) -> None:
        """Set the bits of the tokens that may come next, and no others.

        After the end of the text it is the end-of-text tokens. Forbidden tokens are left out unless nothing else is
        allowed.
        """
        if self._matcher.is_terminated():
            words_W[:] = self._eos_mask_W
        else:
            self._matcher.fill_next_token_bitmask(words_W[None])
        if forbidden_token_ids:
            left_W = words_W & ~_mask_of(forbidden_token_ids, words_W.size)
            if left_W.any():
                words_W[:] = left_W


def read_vocabulary(folder: ModelFolder, vocab_size: int) -> tuple[list[str], bool]:
    """The folder's tokens as the vocabulary writes them, and whether they are byte-level.

    Special tokens, which add nothing to a text, are "". If not byte-level, "▁" is a space and "<0x41>" a byte.
    """
    path = folder.transformer_path / "tokenizer.json"
    if not path.is_file():
        _refuse("json_schema needs the model's tokenizer.json, which this folder lacks")
    tokenizer = Tokenizer.from_file(str(path))
    decoder = json.loads(tokenizer.to_str())["decoder"] or {"type": None}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"] for step in steps}
    if not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
        _refuse("json_schema is supported for byte-level and byte-fallback tokenizers; this model's is neither")
    tokens = [""] * vocab_size
    added = tokenizer.get_added_tokens_decoder()
    for token, token_id in tokenizer.get_vocab().items():
        if token_id < vocab_size and not (token_id in added and added[token_id].special):
            tokens[token_id] = token
    return tokens, "ByteLevel" in kinds


def _mask_of(token_ids: Sequence[int], num_words: int) -> Words:
    words_W = np.zeros(num_words, dtype=np.uint32)
    for token_id in token_ids:
        if 0 <= token_id < num_words * 32:
            words_W[token_id // 32] |= np.uint32(1 << (token_id % 32))
    return words_W.view(np.int32)


def _refuse(message: str) -> NoReturn:
    raise InvalidRequestError(message, param="json_schema")
