"""The route that tells which ranks there are."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from nobiru.serving.responses import JsonResponse
from nobiru.serving.services import Services


class ElasticRoutes:
    """Endpoints about the group of ranks."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def status(self, request: Request) -> Response:
        """The epoch and the ranks with their process and state."""
        return JsonResponse(dict(self._services.client.status()))
