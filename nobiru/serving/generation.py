"""The routes that generate text: completions and chat completions.

Owns the way of a request from body to answer. Prompts become tokens in the pool's threads, tokens come from the engine,
texts are made of them here, on the event loop.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from starlette.requests import Request
from starlette.responses import Response

from nobiru.frontend.text_stream import TextDelta
from nobiru.generation import GenerationRequest
from nobiru.serving.body import read_object
from nobiru.serving.chat_request import parse_chat_request
from nobiru.serving.completions_request import CompletionsRequest, parse_completions_request
from nobiru.serving.disconnect import DisconnectWatch
from nobiru.serving.gate import RequestContext, context_of
from nobiru.serving.generation_answer import AnswerHead, ChatWriter, CompletionWriter, Text, Writer
from nobiru.serving.protocols import GenerationFrontend
from nobiru.serving.responses import JsonResponse
from nobiru.serving.sampling_fields import GenerationLimits
from nobiru.serving.services import Services
from nobiru.serving.sse import EventStream, event
from nobiru.serving.texts_in_progress import TextsInProgress

Updates = list[tuple[Text, TextDelta]]


class GenerationRoutes:
    """Endpoints for one language model. On an embedding model they say that it generates nothing."""

    def __init__(self, services: Services) -> None:
        self._services = services
        spec = services.folder.generation
        self._limits = GenerationLimits(
            max_model_len=services.folder.max_model_len,
            priorities=services.scheduling_policy == "priority",
            sampling_defaults=spec.sampling_defaults if spec is not None else {},
        )

    async def create_completion(self, request: Request) -> Response:
        """Go on with a text, several texts, or token ids."""
        services, context = self._services, context_of(request)
        services.check_generates()
        frontend = services.pool.generation
        asked = parse_completions_request(await self._body(request), self._limits)
        model = services.check_model(asked.model)
        context.ticket = services.admission.admit(asked.num_estimated_tokens)
        with DisconnectWatch(request.receive):
            requests = [
                await services.pool.prepare_generation(
                    prompt,
                    asked.params,
                    request_id=f"{context.unique_id}-{index}",
                    field=name,
                    **asked.prepare_options,
                )
                for index, (prompt, name) in enumerate(zip(asked.prompts, asked.names, strict=True))
            ]
            head = AnswerHead(
                request_id=f"cmpl-{context.unique_id}",
                model=model,
                options=asked.answer,
                texts=frontend.token_texts,
                prompt_ids=_prompt_ids(requests, needed=asked.answer.return_token_ids),
                echoes=_echoes(asked, frontend) if asked.echo else (),
            )
            return await self._answer(context, requests, head, CompletionWriter(head))

    async def create_chat_completion(self, request: Request) -> Response:
        """Answer a conversation."""
        services, context = self._services, context_of(request)
        services.check_generates()
        frontend = services.pool.generation
        asked = parse_chat_request(await self._body(request), self._limits)
        model = services.check_model(asked.model)
        context.ticket = services.admission.admit(asked.num_estimated_tokens)
        with DisconnectWatch(request.receive):
            prepared = await services.pool.prepare_chat(
                asked.messages, asked.params, request_id=context.unique_id, **asked.prepare_options
            )
            head = AnswerHead(
                request_id=f"chatcmpl-{context.unique_id}",
                model=model,
                options=asked.answer,
                texts=frontend.token_texts,
                prompt_ids=_prompt_ids([prepared], needed=asked.answer.return_token_ids),
            )
            return await self._answer(context, [prepared], head, ChatWriter(head))

    async def _body(self, request: Request) -> dict[str, object]:
        config = self._services.config
        return await read_object(request, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s)

    async def _answer(
        self, context: RequestContext, requests: Sequence[GenerationRequest], head: AnswerHead, writer: Writer
    ) -> Response:
        """The whole answer; or, as soon as there is a first token, a stream, so that errors before are plain ones."""
        services, options = self._services, head.options
        progress = TextsInProgress(
            services.client,
            services.pool.generation,
            requests,
            services.metrics,
            arrived_s=context.started_s,
            keep=not options.stream,
        )
        try:
            if context.ticket is not None:
                context.ticket.release_reservation()
            updates = await progress.next()
            if options.stream:
                pieces = _pieces(progress, updates, writer, include_usage=options.include_usage)
                return EventStream(pieces, close=progress.close)
            while updates:
                for text, delta in updates:
                    progress.add(text, delta)
                updates = await progress.next()
        except BaseException:
            progress.close()
            raise
        progress.close()
        return JsonResponse(writer.whole(progress.texts, progress.usage()))


async def _pieces(
    progress: TextsInProgress, updates: Updates, writer: Writer, *, include_usage: bool
) -> AsyncGenerator[bytes]:
    """Encoded events; those that are ready at the same time as one piece."""
    begun = [chunk for text in progress.texts if (chunk := writer.begin(text)) is not None]
    piece = b"".join(map(event, begun))
    while updates:
        for text, delta in updates:
            chunk = writer.chunk(text, delta)
            progress.add(text, delta)
            if chunk is not None:
                piece += event(chunk)
        if piece:
            yield piece
        piece = b""
        updates = await progress.next()
    if include_usage:
        yield event(writer.end(progress.usage()))


def _prompt_ids(requests: Sequence[GenerationRequest], *, needed: bool) -> list[list[int]]:
    return [request.prompt_token_ids.tolist() for request in requests] if needed else []


def _echoes(asked: CompletionsRequest, frontend: GenerationFrontend) -> list[str]:
    return [
        prompt if isinstance(prompt, str) else frontend.tokenizer.decode(prompt, skip_special_tokens=True)
        for prompt in asked.prompts
    ]
