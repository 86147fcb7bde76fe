"""From a request's input and options to token ids.

Owns the validation of `input` and of every option that shapes it: prompts, truncation, `dimensions`. Nothing changes
after construction, so `prepare` may run in several threads at once. Knows nothing of HTTP and of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nobiru.errors import InvalidRequestError
from nobiru.folder.spec import ModelFolder
from nobiru.frontend.prompts import Prompts
from nobiru.frontend.tokenizer import Tokenizer
from nobiru.request import EncodedPrompts, PoolingParams

Input = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
SIDES = ("right", "left")
_EXPECTED = "a string, a list of strings, a list of token ids, or a list of lists of token ids"
_LISTS = (list, tuple, np.ndarray)
_KINDS: dict[type, Callable[[type], bool]] = {
    str: lambda kind: issubclass(kind, str),
    int: lambda kind: kind is not bool and issubclass(kind, int | np.integer),
    list: lambda kind: issubclass(kind, _LISTS),
}


class Frontend:
    """Prepares requests for one model.

    `auto_truncate` cuts what is too long where a request does not say. `max_model_len` (tokens, special ones included)
    is the folder's unless given. Raises `ModelFolderError` when the tokenizer cannot be built.
    """

    def __init__(self, folder: ModelFolder, *, auto_truncate: bool, max_model_len: int | None = None) -> None:
        self.folder = folder
        self.max_model_len = folder.max_model_len if max_model_len is None else max_model_len
        self.tokenizer = Tokenizer(folder)
        self.prompts = Prompts(folder, self.tokenizer, max_tokens=self.max_model_len)
        self._auto_truncate = auto_truncate

    def prepare(self, input: Input, params: PoolingParams) -> EncodedPrompts:
        """Validate and tokenize one request; `InvalidRequestError` names the field, the limit and the value.

        A string or a list of token ids is one sequence, a list of them several. A text too long is cut or refused, as
        `truncate_prompt_tokens` says.
        """
        self._check_options(params)
        prompt = self.prompts.choose(prompt=params.prompt, prompt_name=params.prompt_name)
        max_tokens = self._max_tokens(params.truncate_prompt_tokens)
        limits: dict[str, Any] = {
            "max_tokens": max_tokens,
            "refuse_above": self.max_model_len if max_tokens is None else None,
            "side": params.truncation_side or self.tokenizer.truncation_side,
        }
        if isinstance(input, str):
            input = [input]
            limits["name_of"] = _only_input
        kind = _kind(input)
        if kind is str:
            encoded = self.tokenizer.encode(input, prompt_prefix=prompt.text, **limits)  # type: ignore[arg-type]
            skipped = prompt.num_skipped_tokens
            return replace(encoded, num_skipped_tokens=skipped) if skipped else encoded
        if kind is int:
            limits["name_of"] = _only_input
            return self.tokenizer.from_token_ids([input], **limits)  # type: ignore[list-item]
        return self.tokenizer.from_token_ids(input, **limits)  # type: ignore[arg-type]

    def _max_tokens(self, asked: int | None) -> int | None:
        """To how many tokens to cut, None to refuse what is too long."""
        if asked is None:
            return self.max_model_len if self._auto_truncate else None
        name = "truncate_prompt_tokens"
        if isinstance(asked, bool) or not isinstance(asked, int) or asked == 0 or asked < -1:
            raise InvalidRequestError(
                f"{name} is {asked!r}; it must be -1 (the model's limit, {self.max_model_len}) or a positive integer",
                param=name,
            )
        if asked == -1:
            return self.max_model_len
        if asked > self.max_model_len:
            raise InvalidRequestError(f"{name} is {asked}; the model's limit is {self.max_model_len}", param=name)
        if asked < self.tokenizer.num_special_tokens:
            raise InvalidRequestError(
                f"{name} is {asked}, but every text has {self.tokenizer.num_special_tokens} special tokens", param=name
            )
        return asked

    def _check_options(self, params: PoolingParams) -> None:
        most = self.folder.embedding_dim
        size = params.dimensions
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= most):
            raise InvalidRequestError(
                f"dimensions is {size!r}; it must be an integer from 1 to {most}", param="dimensions"
            )
        if params.truncation_side is not None and params.truncation_side not in SIDES:
            raise InvalidRequestError(
                f"truncation_side is {params.truncation_side!r}; choose from {', '.join(SIDES)}",
                param="truncation_side",
            )
        if params.normalize is not None and not isinstance(params.normalize, bool):
            raise InvalidRequestError(f"normalize is {params.normalize!r}; it must be a boolean", param="normalize")
        if isinstance(params.priority, bool) or not isinstance(params.priority, int):
            raise InvalidRequestError(f"priority is {params.priority!r}; it must be an integer", param="priority")
        for name in ("prompt", "prompt_name"):
            value = getattr(params, name)
            if value is not None and not isinstance(value, str):
                raise InvalidRequestError(f"{name} is {value!r}; it must be a string", param=name)
        _check_encodable(params.prompt)


def _only_input(_: int) -> str:
    return "input"


def _kind(input: object) -> type:
    """What the list `input` holds: str, int, or list for lists of token ids."""
    if not isinstance(input, _LISTS):
        raise InvalidRequestError(f"input is {_described(input)}; {_EXPECTED} is expected", param="input")
    if len(input) == 0:
        raise InvalidRequestError(f"input is an empty list; {_EXPECTED} is expected", param="input")
    kinds = set(map(type, input))
    first = type(input[0])
    for kind, test in _KINDS.items():
        if not test(first):
            continue
        if all(map(test, kinds)):
            return kind
        index = next(index for index, item in enumerate(input) if not test(type(item)))
        raise InvalidRequestError(
            f"input[{index}] is {_described(input[index])}, but input[0] is {_described(input[0])}; all must be alike",
            param=f"input[{index}]",
        )
    raise InvalidRequestError(f"input[0] is {_described(input[0])}; {_EXPECTED} is expected", param="input[0]")


def _described(value: object) -> str:
    if value is None:
        return "null"
    names = {str: "a string", bool: "a boolean", int: "an integer", float: "a number", dict: "an object"}
    return names.get(type(value), "a list" if isinstance(value, _LISTS) else f"a {type(value).__name__}")


def _check_encodable(prompt: str | None) -> None:
    try:
        (prompt or "").encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"prompt is not a valid text: a surrogate stands alone at character {error.start}", param="prompt"
        ) from error
