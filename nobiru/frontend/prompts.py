"""Which prompt is put in front of texts, and how many tokens of it pooling leaves out.

Owns the precedence of prompts and Sentence Transformers' way of counting their tokens. Prompts are for texts; token
ids are taken as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from nobiru.errors import InvalidRequestError
from nobiru.folder.spec import ModelFolder
from nobiru.frontend.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """`text` is put in front of every text; the first `num_skipped_tokens` tokens are not pooled."""

    text: str = ""
    num_skipped_tokens: int = 0


NO_PROMPT = Prompt()


class Prompts:
    """The prompts of a model folder, by name."""

    def __init__(self, folder: ModelFolder, tokenizer: Tokenizer, *, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._skips_prompt = not folder.pooling.include_prompt
        self._by_name = {name: self._prompt(text) for name, text in folder.prompts.items()}
        self._default = NO_PROMPT
        if folder.default_prompt_name is not None:
            self._default = self._by_name[folder.default_prompt_name]

    def choose(self, *, prompt: str | None, prompt_name: str | None) -> Prompt:
        """The text `prompt` ("" for none), else the one of that name, else the model's default."""
        if prompt is not None:
            return self._prompt(prompt)
        if prompt_name is None:
            return self._default
        known = self._by_name.get(prompt_name)
        if known is None:
            names = ", ".join(map(repr, self._by_name)) or "none"
            raise InvalidRequestError(
                f"prompt_name is {prompt_name!r}; the model's prompts are {names}", param="prompt_name"
            )
        return known

    def _prompt(self, text: str) -> Prompt:
        return Prompt(text=text, num_skipped_tokens=self._num_tokens(text) if self._skips_prompt and text else 0)

    def _num_tokens(self, text: str) -> int:
        """The prompt tokenized by itself and cut as texts are, less a special token in last place."""
        ids = self._tokenizer.encode([text], max_tokens=self._max_tokens, name_of=lambda _: "prompt").token_ids
        ends_special = ids.size > 0 and int(ids[-1]) in self._tokenizer.special_ids
        return int(ids.size) - int(ends_special)
