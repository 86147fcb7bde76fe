"""Texts and token ids in, packed token ids out.

Owns special tokens, cutting to a limit and the packing of a request's sequences into one array. A tokenizer is never
changed once it is built, so that any number of threads may use it: its own truncation and padding are off, and ids are
cut here. Knows nothing of prompts and of a request's options.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import chain
from typing import NoReturn

import numpy as np
from tokenizers import Encoding
from tokenizers import Tokenizer as Library

from nobiru.errors import InvalidRequestError, ModelFolderError
from nobiru.folder.spec import ModelFolder
from nobiru.frontend.pieces import GROWTH, MARGIN_TOKENS, cut_piece, first_piece_chars
from nobiru.frontend.pipelines import load_backend
from nobiru.frontend.token_texts import TokenTexts
from nobiru.request import EncodedPrompts, TokenIds

Ids = list[int]
# One call of the library takes texts of this many characters, so that a large request does not keep the library's
# threads from a small one for long.
_SLICE_CHARS = 262_144
_PROBES = ("a", "the house", "1 2 3", "Ω x", "")


def _input_name(index: int) -> str:
    return f"input[{index}]"


class Tokenizer:
    """The tokenizer of a model folder, giving the ids that `transformers` and Sentence Transformers would give.

    `prefix` and `suffix` are the special tokens around every text, `num_special_tokens` of them together;
    `special_ids` are those of all named special tokens.
    `truncation_side` is the one the folder asks for. Raises `ModelFolderError` when the files cannot be honoured.
    """

    def __init__(self, folder: ModelFolder) -> None:
        backend = load_backend(folder)
        self._tokenizer = backend.tokenizer
        self._cuts_at_spaces = backend.cuts_at_spaces
        self._vocab_size = folder.vocab_size
        self.special_ids = backend.special_ids
        self.truncation_side = backend.truncation_side
        self.prefix, self.suffix = _special_tokens(self._tokenizer, folder)
        self.num_special_tokens = len(self.prefix) + len(self.suffix)
        self._margin = max(MARGIN_TOKENS, getattr(self._tokenizer.model, "max_input_chars_per_word", 0))
        # Some folders have more tokens than the model has embeddings; their ids must not reach the model.
        self._has_surplus_tokens = self._tokenizer.get_vocab_size() > self._vocab_size

    def encode(
        self,
        texts: Sequence[str],
        *,
        prompt_prefix: str = "",
        max_tokens: int | None = None,
        side: str = "right",
        refuse_above: int | None = None,
        name_of: Callable[[int], str] = _input_name,
    ) -> EncodedPrompts:
        """Tokenize `prompt_prefix + text` for each text, special tokens included.

        Sequences of more than `max_tokens` are cut at the `side` ("right" or "left"), their special tokens kept;
        sequences of more than `refuse_above` raise `InvalidRequestError`. `name_of` names a text in messages.
        """
        _check_texts(texts, name_of)
        limit = refuse_above if max_tokens is None else max_tokens
        num_wanted = None if limit is None else max(0, limit - self.num_special_tokens) + 1
        packed: list[EncodedPrompts] = []
        first = 0
        for last in _slices(texts):
            chosen = texts[first:last]
            if prompt_prefix:
                chosen = [prompt_prefix + text for text in chosen]
            try:
                bodies, is_partial = self._bodies(chosen, num_wanted, side)
            except TypeError:
                _blame(texts, name_of)
                raise
            if refuse_above is not None:
                self._refuse_long(bodies, is_partial, refuse_above, first, name_of)
            packed.append(self._pack(bodies, max_tokens, side))
            first = last
        return _joined(packed)

    def from_token_ids(
        self,
        lists: Sequence[Sequence[int]],
        *,
        max_tokens: int | None = None,
        side: str = "right",
        refuse_above: int | None = None,
        name_of: Callable[[int], str] = _input_name,
    ) -> EncodedPrompts:
        """Pack token ids as they are: nothing is put in front or behind.

        Cutting keeps the special tokens that a list begins or ends with. Raises `InvalidRequestError` for an empty
        list and for ids that are no integers of 0 … vocab_size - 1.
        """
        token_ids, lengths = self._checked_ids(lists, name_of)
        limit = refuse_above if max_tokens is None else max_tokens
        if limit is None or lengths.max(initial=0) <= limit:
            return EncodedPrompts(token_ids=token_ids, lengths=lengths, truncated=np.zeros(len(lists), dtype=np.bool_))
        if refuse_above is not None and (long := np.flatnonzero(lengths > refuse_above)).size:
            index = int(long[0])
            _refuse_length(name_of(index), f"{lengths[index]} tokens", refuse_above)
        assert max_tokens is not None, "a limit that does not refuse cuts"
        ends = np.cumsum(lengths)[:-1]
        kept = [self._cut_ids(ids, max_tokens, side) for ids in np.split(token_ids, ends)]
        return EncodedPrompts(
            token_ids=np.concatenate(kept),
            lengths=np.minimum(lengths, np.int32(max_tokens)),
            truncated=lengths > max_tokens,
        )

    def check_ids(self, ids: Sequence[int], name: str) -> TokenIds:
        """Token ids [t] of the vocabulary as an array. Raises `InvalidRequestError` as `from_token_ids` does."""
        return self._checked_ids([ids], lambda _: name)[0]

    def count(self, text: str) -> int:
        """The number of tokens of a text, special ones included."""
        return self.encode([text]).num_tokens

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary writes them; "" for an id without one."""
        return [self._tokenizer.id_to_token(identifier) or "" for identifier in ids]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids; those without a token have none."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_texts(self) -> TokenTexts:
        """What each token adds to a text. Takes a while: to be called once."""
        return TokenTexts(self._tokenizer)

    def _bodies(self, texts: Sequence[str], num_wanted: int | None, side: str) -> tuple[list[Ids], set[int]]:
        """Ids without special tokens: all of a text, or at least `num_wanted` at the end that `side` leaves.

        Also the indices of texts of which not all ids are there.
        """
        chars = 0 if num_wanted is None else first_piece_chars(num_wanted)
        if num_wanted is None or not self._cuts_at_spaces or max(map(len, texts)) <= chars:
            return [encoding.ids for encoding in self._encode(texts)], set()
        bodies: list[Ids] = [[]] * len(texts)
        pending = list(range(len(texts)))
        partial: set[int] = set()
        while pending:
            pieces = [cut_piece(texts[index], chars, side) for index in pending]
            unfinished: list[int] = []
            for index, piece, encoding in zip(pending, pieces, self._encode(pieces), strict=True):
                ids = encoding.ids
                if len(piece) == len(texts[index]):
                    bodies[index] = ids
                elif len(ids) >= num_wanted + self._margin:
                    bodies[index] = ids[:num_wanted] if side == "right" else ids[len(ids) - num_wanted :]
                    partial.add(index)
                else:
                    unfinished.append(index)
            pending = unfinished
            chars *= GROWTH
        return bodies, partial

    def _encode(self, texts: Sequence[str]) -> list[Encoding]:
        return self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)

    def _refuse_long(
        self, bodies: list[Ids], is_partial: set[int], refuse_above: int, first: int, name_of: Callable[[int], str]
    ) -> None:
        for index, ids in enumerate(bodies):
            length = len(ids) + self.num_special_tokens
            if length > refuse_above:
                described = f"more than {refuse_above} tokens" if index in is_partial else f"{length} tokens"
                _refuse_length(name_of(first + index), described, refuse_above)

    def _pack(self, bodies: list[Ids], max_tokens: int | None, side: str) -> EncodedPrompts:
        # One pass in plain Python: for the common request of a single text, each call of numpy costs more than this.
        num_special, prefix, suffix = self.num_special_tokens, self.prefix, self.suffix
        room = sys.maxsize if max_tokens is None else max(0, max_tokens - num_special)
        flat: Ids = []
        lengths: Ids = []
        truncated = np.zeros(len(bodies), dtype=np.bool_)
        for index, ids in enumerate(bodies):
            if len(ids) > room:
                ids = ids[:room] if side == "right" else ids[len(ids) - room :]
                truncated[index] = True
            flat += prefix
            flat += ids
            flat += suffix
            lengths.append(len(ids) + num_special)
        if self._has_surplus_tokens and max(flat, default=0) >= self._vocab_size:
            self._refuse_surplus(flat)
        return EncodedPrompts(
            token_ids=np.array(flat, dtype=np.int32), lengths=np.array(lengths, dtype=np.int32), truncated=truncated
        )

    def _refuse_surplus(self, flat: Ids) -> NoReturn:
        token = self._tokenizer.id_to_token(next(identifier for identifier in flat if identifier >= self._vocab_size))
        raise InvalidRequestError(
            f"input holds {token!r}, a token of the tokenizer for which the model has no embedding", param="input"
        )

    def _cut_ids(self, ids: TokenIds, max_tokens: int, side: str) -> TokenIds:
        """The first or last ids; special tokens at the beginning and the end stay where they are."""
        if ids.size <= max_tokens:
            return ids
        head = len(self.prefix) if tuple(ids[: len(self.prefix)].tolist()) == self.prefix else 0
        tail = len(self.suffix) if tuple(ids[ids.size - len(self.suffix) :].tolist()) == self.suffix else 0
        room = max(0, max_tokens - head - tail)
        body = ids[head : ids.size - tail]
        body = body[:room] if side == "right" else body[body.size - room :]
        return np.concatenate([ids[:head], body, ids[ids.size - tail :]])

    def _checked_ids(self, lists: Sequence[Sequence[int]], name_of: Callable[[int], str]) -> tuple[TokenIds, TokenIds]:
        """All ids [T] and the lengths [N]; each id is an integer of the vocabulary."""
        lengths = np.fromiter(map(len, lists), dtype=np.int32, count=len(lists))
        if (empty := np.flatnonzero(lengths == 0)).size:
            name = name_of(int(empty[0]))
            raise InvalidRequestError(f"{name} is an empty list of token ids; give at least one", param=name)
        try:
            if not all(map(_is_integer_type, set(map(type, chain.from_iterable(lists))))):
                raise TypeError
            token_ids = np.fromiter(chain.from_iterable(lists), dtype=np.int64, count=int(lengths.sum()))
            if token_ids.min(initial=0) < 0 or token_ids.max(initial=0) >= self._vocab_size:
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            self._refuse_ids(lists, name_of)
            raise
        return token_ids.astype(np.int32), lengths

    def _refuse_ids(self, lists: Sequence[Sequence[int]], name_of: Callable[[int], str]) -> None:
        for index, ids in enumerate(lists):
            for position, identifier in enumerate(ids):
                if not _is_integer_type(type(identifier)) or not 0 <= identifier < self._vocab_size:
                    name = f"{name_of(index)}[{position}]"
                    raise InvalidRequestError(
                        f"{name} is {identifier!r}; a token id is an integer from 0 to {self._vocab_size - 1}",
                        param=name,
                    )


def _special_tokens(tokenizer: Library, folder: ModelFolder) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor puts in front of and behind every text, found by comparing with and without."""

    def splits(text: str) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
        bare = tokenizer.encode(text, add_special_tokens=False).ids
        full = tokenizer.encode(text, add_special_tokens=True).ids
        starts = range(len(full) - len(bare) + 1)
        return {
            (tuple(full[:start]), tuple(full[start + len(bare) :]))
            for start in starts
            if full[start : start + len(bare)] == bare
        }

    found = reduce(set.intersection, map(splits, _PROBES))
    if len(found) != 1:
        raise ModelFolderError(
            f"{folder.transformer_path / 'tokenizer.json'}: field 'post_processor' does more than to put fixed special "
            "tokens in front of and behind a text, which cannot be honoured"
        )
    prefix, suffix = found.pop()
    if any(identifier >= folder.vocab_size for identifier in (*prefix, *suffix)):
        raise ModelFolderError(
            f"{folder.transformer_path / 'tokenizer.json'}: the special tokens have ids {[*prefix, *suffix]}, but the "
            f"model's vocabulary has {folder.vocab_size} ('vocab_size' of config.json)"
        )
    return prefix, suffix


def _slices(texts: Sequence[str]) -> Iterator[int]:
    """The ends of runs of texts that are long enough together to be worth a call."""
    chars = 0
    end = 0
    for index, text in enumerate(texts, start=1):
        chars += len(text)
        if chars >= _SLICE_CHARS:
            yield (end := index)
            chars = 0
    if end < len(texts):
        yield len(texts)


def _joined(parts: list[EncodedPrompts]) -> EncodedPrompts:
    if len(parts) == 1:
        return parts[0]
    return EncodedPrompts(
        token_ids=np.concatenate([np.empty(0, np.int32), *(part.token_ids for part in parts)]),
        lengths=np.concatenate([np.empty(0, np.int32), *(part.lengths for part in parts)]),
        truncated=np.concatenate([np.empty(0, np.bool_), *(part.truncated for part in parts)]),
    )


def _check_texts(texts: Sequence[str], name_of: Callable[[int], str]) -> None:
    if all(issubclass(kind, str) for kind in set(map(type, texts))):
        return
    index = next(index for index, text in enumerate(texts) if not isinstance(text, str))
    name = name_of(index)
    raise InvalidRequestError(f"{name} is a {type(texts[index]).__name__}; a string is expected", param=name)


def _blame(texts: Sequence[str], name_of: Callable[[int], str]) -> None:
    for index, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            name = name_of(index)
            raise InvalidRequestError(
                f"{name} is not a valid text: half of a surrogate pair stands alone at character {error.start}",
                param=name,
            ) from error


def _is_integer_type(kind: type) -> bool:
    return kind is not bool and issubclass(kind, int | np.integer)


def _refuse_length(name: str, described: str, limit: int) -> NoReturn:
    raise InvalidRequestError(
        f"{name} has {described}, but the limit is {limit}; shorten it, or ask for truncation with "
        "truncate_prompt_tokens=-1",
        param=name,
        code="context_length_exceeded",
    )
