"""The routes that show texts as the model sees them, and tokens as texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from nobiru.errors import InvalidRequestError
from nobiru.frontend.pool import num_chat_chars
from nobiru.pools import fixed_pool
from nobiru.serving.admission import estimate_tokens
from nobiru.serving.body import read_object
from nobiru.serving.chat_request import CHAT, read_messages, read_template_options
from nobiru.serving.disconnect import DisconnectWatch
from nobiru.serving.fields import Fields
from nobiru.serving.gate import context_of
from nobiru.serving.protocols import Tokenizer
from nobiru.serving.responses import JsonResponse
from nobiru.serving.services import Services

TOKENIZE = ("prompt", "model", "add_special_tokens", "return_token_strs")
TOKENIZE_CHAT = ("model", "return_token_strs", *CHAT)
DETOKENIZE = ("tokens", "model")
MAX_DETOKENIZED = 1_000_000
MAX_TOKEN_ID = 2**31 - 1

T = TypeVar("T")


class TokenizeRoutes:
    """`POST /tokenize` and `POST /detokenize`, with the fields vLLM has. Nothing is cut, no prompt is put in front."""

    def __init__(self, services: Services) -> None:
        self._services = services
        # A thread of its own, so that looking at tokens never stands in the way of other requests.
        self._thread = fixed_pool(1, "tokenize-route")

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or of a chat, with their strings when asked for."""
        services = self._services
        body = await self._body(request)
        tokenizer = services.pool.frontend.tokenizer
        if "messages" in body:
            fields = Fields(body, TOKENIZE_CHAT)
            services.check_generates()
            messages = read_messages(fields)
            render = partial(services.pool.generation.render_chat, messages, **read_template_options(fields))
            with_special_tokens = fields.boolean("add_special_tokens") is True
            num_chars = num_chat_chars(messages)
        else:
            fields = Fields(body, TOKENIZE)
            text = fields.string("prompt")
            if text is None:
                raise InvalidRequestError("prompt is missing; give the text to tokenize", param="prompt")
            render = partial(str, text)
            with_special_tokens = fields.boolean("add_special_tokens") is not False
            num_chars = len(text)
        services.check_model(fields.string("model"))
        ids, strings = await self._in_thread(
            request,
            estimate_tokens(1, num_chars),
            partial(_tokenize, tokenizer, render, with_special_tokens=with_special_tokens),
        )
        return JsonResponse(
            {
                "count": len(ids),
                "max_model_len": services.folder.max_model_len,
                "tokens": ids,
                "token_strs": strings if fields.boolean("return_token_strs") else None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        services = self._services
        fields = Fields(await self._body(request), DETOKENIZE)
        services.check_model(fields.string("model"))
        ids = fields.integers("tokens", max_length=MAX_DETOKENIZED)
        if ids is None:
            raise InvalidRequestError("tokens is missing; give a list of token ids", param="tokens")
        if wrong := [token for token in ids if not 0 <= token <= MAX_TOKEN_ID]:
            raise InvalidRequestError(f"tokens has the id {wrong[0]}, which no token has", param="tokens")
        decode = partial(services.pool.frontend.tokenizer.decode, ids)
        return JsonResponse({"prompt": await self._in_thread(request, len(ids), decode)})

    async def _body(self, request: Request) -> dict[str, Any]:
        config = self._services.config
        return await read_object(request, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s)

    async def _in_thread(self, request: Request, num_estimated_tokens: int, function: Callable[[], T]) -> T:
        context_of(request).ticket = self._services.admission.admit(num_estimated_tokens)
        with DisconnectWatch(request.receive):
            return await asyncio.get_running_loop().run_in_executor(self._thread, function)


def _tokenize(
    tokenizer: Tokenizer, render: Callable[[], str], *, with_special_tokens: bool
) -> tuple[list[int], list[str]]:
    ids = tokenizer.encode([render()]).token_ids.tolist()
    if not with_special_tokens:
        ids = ids[len(tokenizer.prefix) : len(ids) - len(tokenizer.suffix)]
    return ids, tokenizer.tokens(ids)
