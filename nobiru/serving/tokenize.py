"""The route that shows a text as the model sees it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from starlette.requests import Request
from starlette.responses import Response

from nobiru.errors import InvalidRequestError
from nobiru.serving.admission import estimate_tokens
from nobiru.serving.body import read_object
from nobiru.serving.disconnect import DisconnectWatch
from nobiru.serving.fields import Fields
from nobiru.serving.gate import context_of
from nobiru.serving.protocols import Tokenizer
from nobiru.serving.responses import JsonResponse
from nobiru.serving.services import Services

KNOWN = ("prompt", "model", "add_special_tokens", "return_token_strs")


class TokenizeRoutes:
    """`POST /tokenize`, with the fields vLLM has. The text is not cut, and gets no prompt in front."""

    def __init__(self, services: Services) -> None:
        self._services = services
        # A thread of its own, so that looking at tokens never stands in the way of embedding.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize-route")

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text, with their strings when asked for."""
        services, context = self._services, context_of(request)
        body = await read_object(
            request, max_bytes=services.config.max_body_bytes, timeout_s=services.config.body_timeout_s
        )
        fields = Fields(body, KNOWN)
        services.check_model(fields.string("model"))
        text = fields.string("prompt")
        if text is None:
            raise InvalidRequestError("prompt is missing; give the text to tokenize", param="prompt")
        with_special_tokens = fields.boolean("add_special_tokens") is not False
        context.ticket = services.admission.admit(estimate_tokens(1, len(text)))
        with DisconnectWatch(request.receive):
            ids, strings = await asyncio.get_running_loop().run_in_executor(
                self._thread, _tokenize, services.pool.frontend.tokenizer, text, with_special_tokens
            )
        return JsonResponse(
            {
                "count": len(ids),
                "max_model_len": services.folder.max_model_len,
                "tokens": ids,
                "token_strs": strings if fields.boolean("return_token_strs") else None,
            }
        )


def _tokenize(tokenizer: Tokenizer, text: str, with_special_tokens: bool) -> tuple[list[int], list[str]]:
    ids = tokenizer.encode([text]).token_ids.tolist()
    if not with_special_tokens:
        ids = ids[len(tokenizer.prefix) : len(ids) - len(tokenizer.suffix)]
    return ids, tokenizer.tokens(ids)
