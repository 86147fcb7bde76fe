"""The routes that OpenAI clients use: embeddings and the list of models.

Owns the way of a request from body to answer. Tokenization is the pool's, computation the engine's.
"""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from nobiru.request import PoolingRequest
from nobiru.serving.body import read_object
from nobiru.serving.disconnect import DisconnectWatch
from nobiru.serving.embeddings_answer import num_vectors_per_slice, write_answer
from nobiru.serving.embeddings_request import RequestLimits, parse_embeddings_request
from nobiru.serving.gate import context_of
from nobiru.serving.responses import JsonResponse, SlicedJsonResponse
from nobiru.serving.services import Services


class OpenAIRoutes:
    """Endpoints for one model, served under one or several names."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._limits = RequestLimits(
            embedding_dim=services.folder.embedding_dim,
            max_model_len=services.folder.max_model_len,
            priorities=services.scheduling_policy == "priority",
        )
        self._created = int(time.time())

    async def create_embeddings(self, request: Request) -> Response:
        """Embed one text, several texts, or token ids."""
        services, context = self._services, context_of(request)
        services.check_embeds()
        body = await read_object(
            request, max_bytes=services.config.max_body_bytes, timeout_s=services.config.body_timeout_s
        )
        asked = parse_embeddings_request(body, self._limits)
        model = services.check_model(asked.model)
        context.ticket = services.admission.admit(asked.num_estimated_tokens)
        with DisconnectWatch(request.receive):
            started_s = time.perf_counter()
            prompts = await services.pool.prepare(asked.input, asked.params)
            services.metrics.observe_tokenize(time.perf_counter() - started_s)
            context.ticket.release_reservation()
            vectors_ND = await services.client.embed(
                PoolingRequest(
                    request_id=context.unique_id,
                    prompts=prompts,
                    dimensions=asked.params.dimensions,
                    normalize=asked.params.normalize,
                    priority=asked.params.priority,
                )
            )
        pieces = write_answer(vectors_ND, prompts, model=model, base64=asked.base64)
        if len(vectors_ND) <= num_vectors_per_slice(vectors_ND.shape[1]):
            return JsonResponse(b"".join(pieces))
        return SlicedJsonResponse(pieces)

    async def list_models(self, request: Request) -> Response:
        """The names this server's model answers to."""
        return JsonResponse({"object": "list", "data": [self._card(name) for name in self._services.model_names]})

    async def get_model(self, request: Request) -> Response:
        """One of the names."""
        return JsonResponse(self._card(self._services.check_model(request.path_params["model_id"])))

    def _card(self, name: str) -> dict[str, object]:
        folder = self._services.folder
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "nobiru",
            "root": self._services.model_names[0],
            "max_model_len": folder.max_model_len,
            **({"embedding_dim": folder.embedding_dim} if folder.task == "embed" else {}),
            "task": folder.task,
        }
