"""From prompts, chats and sampling options to requests that the engine takes as they are.

Owns what of a request depends on the model: lengths, the vocabulary, end-of-text tokens, the chat template, and the
random seed. Nothing changes after construction, so it may be used by several threads at once. Knows nothing of HTTP and
of the engine.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from nobiru.errors import InvalidRequestError, ModelFolderError
from nobiru.folder.spec import ModelFolder
from nobiru.frontend.chat import ChatTemplate, Message
from nobiru.frontend.text_stream import TextStream
from nobiru.frontend.tokenizer import Tokenizer
from nobiru.generation import GenerationRequest, SamplingParams
from nobiru.guided import check_schema
from nobiru.request import TokenIds

MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 100.0
_SEED_BITS = 63


class GenerationFrontend:
    """Prepares generation requests for one language model.

    `max_model_len` (tokens of prompt and output together) is the folder's unless given. Raises `ModelFolderError` when
    tokenizer or chat template cannot be read.
    """

    def __init__(self, folder: ModelFolder, *, max_model_len: int | None = None) -> None:
        if folder.generation is None:
            raise ModelFolderError(f"{folder.path} is not a language model: it makes embeddings, and no text")
        self.folder = folder
        self.spec = folder.generation
        self.max_model_len = folder.max_model_len if max_model_len is None else max_model_len
        self.tokenizer = Tokenizer(folder)
        self.token_texts = self.tokenizer.token_texts()
        source = self.spec.chat_template
        self._template = None if source is None else ChatTemplate(source, self.spec.special_tokens)

    def prepare(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        field: str = "prompt",
        add_special_tokens: bool = True,
        default_max_tokens: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> GenerationRequest:
        """One request for a text or for token ids, which are taken as they are. Errors call it `field`.

        `default_max_tokens` counts when `params.max_tokens` is None, as far as the model's limit allows; without it
        a text may grow up to the limit. `truncate_prompt_tokens` keeps the last k tokens, -1 as many as leave room for
        the output. Raises `InvalidRequestError` that names field, limit and value.
        """
        self._check(params)
        limit = self._prompt_limit(params, default_max_tokens, truncate_prompt_tokens)
        if isinstance(prompt, str):
            ids = self._tokenize(prompt, field, add_special_tokens=add_special_tokens, keep=limit)
        else:
            ids = self._checked(prompt, field)
            ids = ids if limit is None else ids[-limit:]
        return self._request(ids, params, field, request_id, default_max_tokens)

    def prepare_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams,
        *,
        request_id: str,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        default_max_tokens: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> GenerationRequest:
        """One request for a chat: the messages as the model's template writes them, which has its own special tokens.

        Raises `InvalidRequestError`, also when the model has no template.
        """
        self._check(params)
        limit = self._prompt_limit(params, default_max_tokens, truncate_prompt_tokens)
        text = self.render_chat(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )
        ids = self._tokenize(text, "messages", add_special_tokens=add_special_tokens, keep=limit)
        return self._request(ids, params, "messages", request_id, default_max_tokens)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text a chat becomes. Raises `InvalidRequestError`."""
        if self._template is None:
            raise InvalidRequestError(
                f"the model {self.folder.name!r} has no chat template, so it cannot take messages; prompt it with text "
                "(/v1/completions, LLM.generate)",
                param="messages",
                code="no_chat_template",
            )
        return self._template.render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=template_kwargs,
        )

    def text_streams(self, request: GenerationRequest) -> list[TextStream]:
        """For each child, what turns its tokens into text."""
        previous_id = int(request.prompt_token_ids[-1])
        return [
            TextStream(self.token_texts, request.params, child=child, previous_id=previous_id)
            for child in range(request.params.n)
        ]

    # ---- prompts ----------------------------------------------------------------------------------------------------

    def _prompt_limit(self, params: SamplingParams, default: int | None, truncate: int | None) -> int | None:
        """How many tokens of the prompt to keep; None for all."""
        if truncate is None:
            return None
        name, most = "truncate_prompt_tokens", self.max_model_len - 1
        if isinstance(truncate, bool) or not isinstance(truncate, int) or truncate == 0 or truncate < -1:
            raise InvalidRequestError(f"{name} is {truncate!r}; it must be -1 or a positive integer", param=name)
        if truncate > most:
            raise InvalidRequestError(
                f"{name} is {truncate}; a prompt has at most {most} tokens, one less than max_model_len", param=name
            )
        if truncate == -1:
            return max(1, self.max_model_len - (params.max_tokens or default or 1))
        return truncate

    def _tokenize(self, text: str, field: str, *, add_special_tokens: bool, keep: int | None) -> TokenIds:
        """All ids, or the last `keep`; of a text far too long, only so many that its length is seen to be too much."""
        tokenizer = self.tokenizer
        num_extra = 0 if add_special_tokens else tokenizer.num_special_tokens
        encoded = tokenizer.encode(
            [text],
            max_tokens=(self.max_model_len if keep is None else keep) + num_extra,
            side="right" if keep is None else "left",
            name_of=lambda _: field,
        )
        if keep is None and bool(encoded.truncated[0]):
            raise self._too_long(field, f"more than {self.max_model_len} tokens")
        ids = encoded.token_ids
        return ids if add_special_tokens else ids[len(tokenizer.prefix) : ids.size - len(tokenizer.suffix)]

    def _checked(self, prompt: Sequence[int], field: str) -> TokenIds:
        if not isinstance(prompt, list | tuple | np.ndarray):
            raise InvalidRequestError(f"{field} must be a text or a list of token ids", param=field)
        return self.tokenizer.check_ids(prompt, field)

    def _request(
        self, ids: TokenIds, params: SamplingParams, field: str, request_id: str, default_max_tokens: int | None
    ) -> GenerationRequest:
        num_prompt = int(ids.size)
        if num_prompt == 0:
            raise InvalidRequestError(f"{field} has 0 tokens; at least one is needed to go on from", param=field)
        room = self.max_model_len - num_prompt
        if room < 1:
            raise self._too_long(field, f"{num_prompt} tokens")
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = room if default_max_tokens is None else min(room, default_max_tokens)
        elif max_tokens > room:
            raise InvalidRequestError(
                f"max_tokens is {max_tokens}, but the model's maximum context length is {self.max_model_len} tokens "
                f"and {field} has {num_prompt}; choose at most {room}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if params.min_tokens > max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {params.min_tokens}, but at most {max_tokens} tokens can follow this prompt",
                param="min_tokens",
            )
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=secrets.randbits(_SEED_BITS))
        ends = () if params.ignore_eos else self.spec.eos_token_ids
        return GenerationRequest(
            request_id=request_id,
            prompt_token_ids=ids,
            params=params,
            max_tokens=max_tokens,
            stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *ends))),
        )

    def _too_long(self, field: str, described: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"{field} has {described}, but the model's maximum context length is {self.max_model_len} tokens, of which "
            "at least one is for the output",
            param=field,
            code="context_length_exceeded",
        )

    # ---- options ----------------------------------------------------------------------------------------------------

    def _check(self, params: SamplingParams) -> None:
        """What `SamplingParams` cannot know: the vocabulary, and whether the schema can be honoured."""
        if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids has {len(params.stop_token_ids)} entries; at most {MAX_STOP_TOKEN_IDS} are possible",
                param="stop_token_ids",
            )
        for index, token_id in enumerate(params.stop_token_ids):
            self._check_id(token_id, f"stop_token_ids[{index}]")
        for token_id, bias in params.logit_bias.items():
            self._check_id(token_id, "logit_bias")
            if (
                isinstance(bias, bool)
                or not isinstance(bias, int | float)
                or not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS
            ):
                raise InvalidRequestError(
                    f"logit_bias of token {token_id} is {bias!r}; it must be a number from {-MAX_LOGIT_BIAS:g} to "
                    f"{MAX_LOGIT_BIAS:g}",
                    param="logit_bias",
                )
        if params.json_schema is not None:
            check_schema(params.json_schema)

    def _check_id(self, token_id: object, name: str) -> None:
        size = self.folder.vocab_size
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < size:
            raise InvalidRequestError(
                f"{name} has the token id {token_id!r}; token ids of this model are integers from 0 to {size - 1}",
                param=name,
            )
