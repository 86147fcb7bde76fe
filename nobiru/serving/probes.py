"""The routes for whoever watches the server: health, readiness, version, metrics.

Owns what "ready" means. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import logging
import time

from starlette.requests import Request
from starlette.responses import Response

from nobiru import __version__
from nobiru.errors import UnavailableError
from nobiru.serving.responses import JsonResponse
from nobiru.serving.services import Services

# A rank that stands still is given up after `rank_timeout_s`, and within this time the others go on: until then nobody
# need look elsewhere. Where it is given up late, a probe finds out before that.
RECOVERY_S = 5.0
MAX_WAIT_FOR_RANK_S = 30.0
PROBE_FRESH_S = 5.0
# Below the two seconds after which common health checkers give up.
PROBE_TIMEOUT_S = 1.5

log = logging.getLogger("nobiru.server")


class ProbeRoutes:
    """Endpoints that always answer, and at once."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._probe: asyncio.Task[bool] | None = None
        self._last_probe_s = float("-inf")
        self._forward_fresh_s = min(services.config.rank_timeout_s, MAX_WAIT_FOR_RANK_S) + RECOVERY_S

    async def health(self, request: Request) -> Response:
        """200 while the process lives."""
        return JsonResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """200 when a request sent now would be computed; 503 with the reason otherwise."""
        if (reason := self._why_not()) or (reason := await self._why_stuck()):
            raise UnavailableError(f"not ready: {reason}", code="not_ready", retry_after_s=1)
        return JsonResponse({"status": "ready"})

    async def version(self, request: Request) -> Response:
        """This server's version."""
        return JsonResponse({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        """Metrics in Prometheus' text format."""
        client, metrics = self._services.client, self._services.metrics
        metrics.set_queue(
            num_requests=client.queued_requests,
            num_tokens=client.queued_tokens,
            estimated_wait_s=self._services.admission.estimated_wait_s(),
            num_ranks=client.usage().size,
        )
        body, content_type = metrics.render()
        return Response(body, headers={"content-type": content_type})

    def _why_not(self) -> str | None:
        client = self._services.client
        if self._services.admission.draining:
            return "the server is shutting down"
        if client.model_info is None:
            return "the model is loading"
        if not client.has_working_rank:
            return "no rank is working; one is being started"
        return None

    async def _why_stuck(self) -> str | None:
        """A recent forward pass or probe shows that ranks work; without one, probe, once for all who ask."""
        now_s = time.monotonic()
        last_forward_s = self._services.client.last_forward_s
        if last_forward_s is not None and now_s - last_forward_s < self._forward_fresh_s:
            return None
        if now_s - self._last_probe_s < PROBE_FRESH_S:
            return None
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._run_probe())
        await asyncio.wait({self._probe}, timeout=PROBE_TIMEOUT_S)
        if self._probe.done() and self._probe.result():
            return None
        fresh_s = self._forward_fresh_s
        return f"no forward pass ended in the last {fresh_s:g} s, nor a probe within {PROBE_TIMEOUT_S:g} s"

    async def _run_probe(self) -> bool:
        try:
            passed = await self._services.client.probe(PROBE_TIMEOUT_S)
        except Exception:
            log.exception("a probe of the ranks failed")
            return False
        if passed:
            self._last_probe_s = time.monotonic()
        return passed
