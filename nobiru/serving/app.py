"""The FastAPI application: which routes there are and what stands before them.

Owns the table of routes. Hot routes are plain functions of a Starlette request, called by the gate directly; FastAPI
describes them at /docs and /openapi.json, and serves what the gate does not know.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nobiru import __version__
from nobiru.config import SchedulingPolicy, ServerConfig
from nobiru.errors import MethodNotAllowedError, NobiruError, NotFoundError
from nobiru.folder.spec import ModelFolder
from nobiru.metrics import AutoscalerMetrics, Metrics
from nobiru.pools import fixed_pool
from nobiru.serving import openapi
from nobiru.serving.admission import Admission
from nobiru.serving.autoscaler import Autoscaler
from nobiru.serving.elastic import DRAIN_TIMEOUT_S, ElasticRoutes
from nobiru.serving.gate import Endpoint, Gate
from nobiru.serving.generation import GenerationRoutes
from nobiru.serving.openai import OpenAIRoutes
from nobiru.serving.probes import ProbeRoutes
from nobiru.serving.protocols import Engine, Pool
from nobiru.serving.responses import error_response
from nobiru.serving.services import Services
from nobiru.serving.tokenize import TokenizeRoutes

log = logging.getLogger("nobiru.server")

NUM_WAITERS = 4


class RawRoute(APIRoute):
    """A route whose function takes the request itself and returns the response: FastAPI only describes it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return handler


class NobiruApp(FastAPI):
    """FastAPI behind our gate. `admission` and `gate` are what a server needs to drain."""

    def __init__(self, services: Services, **options: Any) -> None:
        super().__init__(**options)
        self.router.route_class = RawRoute
        self.router.redirect_slashes = False
        self.add_exception_handler(HTTPException, _answer_http_exception)
        self.add_exception_handler(NobiruError, _answer_error)
        self.admission = services.admission
        self.gate = Gate(
            endpoints=self._add_routes(services),
            fallback=super().__call__,
            api_keys=(*services.config.api_keys, *services.config.admin_keys) if services.config.api_keys else (),
            admission=services.admission,
            metrics=services.metrics,
            log_access=services.config.access_log,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self.gate(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    def _add_routes(self, services: Services) -> dict[tuple[str, str], Endpoint]:
        """Register all routes; those without parameters in their path are returned for the gate."""
        models, probes, texts = OpenAIRoutes(services), ProbeRoutes(services), GenerationRoutes(services)
        tokens = TokenizeRoutes(services)
        elastic = ElasticRoutes(services)
        routes: list[tuple[str, str, Endpoint, str, dict[str, Any] | None]] = [
            ("POST", "/v1/embeddings", models.create_embeddings, "OpenAI", openapi.EMBEDDINGS),
            ("POST", "/v1/completions", texts.create_completion, "OpenAI", openapi.COMPLETIONS),
            ("POST", "/v1/chat/completions", texts.create_chat_completion, "OpenAI", openapi.CHAT),
            ("GET", "/v1/models", models.list_models, "OpenAI", None),
            ("GET", "/v1/models/{model_id:path}", models.get_model, "OpenAI", openapi.MODEL),
            ("POST", "/tokenize", tokens.tokenize, "Tokenizer", openapi.TOKENIZE),
            ("POST", "/detokenize", tokens.detokenize, "Tokenizer", openapi.DETOKENIZE),
            ("GET", "/health", probes.health, "Operation", None),
            ("GET", "/ready", probes.ready, "Operation", None),
            ("GET", "/version", probes.version, "Operation", None),
            ("GET", "/metrics", probes.metrics, "Operation", None),
            ("GET", "/elastic/status", elastic.status, "Ranks", None),
            ("GET", "/elastic/operations", elastic.list_operations, "Ranks", None),
            ("POST", "/elastic/operations", elastic.create_operation, "Ranks", None),
            ("GET", "/elastic/operations/{operation_id}", elastic.get_operation, "Ranks", None),
            ("DELETE", "/elastic/operations/{operation_id}", elastic.cancel_operation, "Ranks", None),
            ("POST", "/scale_elastic_ep", elastic.scale, "Ranks", None),
            ("POST", "/is_scaling_elastic_ep", elastic.is_scaling, "Ranks", None),
        ]
        for method, path, endpoint, tag, description in routes:
            self.add_api_route(
                path, endpoint, methods=[method], tags=[tag], response_model=None, openapi_extra=description
            )
        return {(method, path): endpoint for method, path, endpoint, _, _ in routes if "{" not in path}


def create_app(
    config: ServerConfig,
    folder: ModelFolder,
    pool: Pool,
    client: Engine,
    metrics: Metrics,
    *,
    scheduling_policy: SchedulingPolicy = "priority",
) -> NobiruApp:
    """The application, which starts `client` when it starts, and stops it when it ends."""
    admission = Admission(client, max_queued_tokens=config.max_queued_tokens)
    autoscaler = _autoscaler(config, client, admission, metrics)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # For short waits, most of all for the ends of processes.
        asyncio.get_running_loop().set_default_executor(fixed_pool(NUM_WAITERS, "wait"))
        try:
            try:
                await client.start()
            except Exception as error:
                app.state.start_error = error  # for the server: the ASGI protocol only passes text on
                raise
            async with contextlib.nullcontext() if autoscaler is None else autoscaler.running():
                yield
        finally:
            await client.stop()

    services = Services(
        config=config,
        scheduling_policy=scheduling_policy,
        folder=folder,
        pool=pool,
        client=client,
        metrics=metrics,
        admission=admission,
        autoscaler=autoscaler,
    )
    return NobiruApp(services, title="nobiru", version=__version__, lifespan=lifespan)


def _autoscaler(config: ServerConfig, client: Engine, admission: Admission, metrics: Metrics) -> Autoscaler | None:
    if config.autoscaling is None:
        return None
    drain_timeout_s = DRAIN_TIMEOUT_S if config.drain_by_default else None
    return Autoscaler(
        config.autoscaling, client, admission, AutoscalerMetrics(metrics.registry), drain_timeout_s=drain_timeout_s
    )


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """What Starlette's router says (404 and 405, mostly), in our shape."""
    assert isinstance(error, HTTPException)
    headers = [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
    what = f"{request.method} {request.url.path[:200]}"
    if error.status_code == NotFoundError.status:
        return error_response(NotFoundError(f"there is no {what}; /docs lists the routes", code="not_found"), headers)
    if error.status_code == MethodNotAllowedError.status:
        allowed = (error.headers or {}).get("Allow", "another method")
        return error_response(MethodNotAllowedError(f"there is no {what}; use {allowed}"), headers)
    other = NobiruError(str(error.detail))
    other.status = error.status_code
    return error_response(other, headers)


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, NobiruError)
    return error_response(error)
