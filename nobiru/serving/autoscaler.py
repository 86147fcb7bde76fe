"""Lets the number of ranks follow the load: looks at the queue at regular intervals, and asks for what is decided.

Owns the interval, and what is told of decisions: log, status, metrics. Decisions are `nobiru.elastic.autoscale`'s; an
operation that comes of one is like a user's, but for its origin.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from nobiru.config import AutoscaleConfig
from nobiru.elastic.autoscale import Decision, Observation, State, decide
from nobiru.elastic.membership import ENDED
from nobiru.errors import NobiruError
from nobiru.metrics import AutoscalerMetrics
from nobiru.serving.admission import Admission
from nobiru.serving.protocols import Engine

INTERVAL_S = 0.5

log = logging.getLogger("nobiru.autoscaler")


class Autoscaler:
    """Looks at intervals while `running`. Ranks that leave get `drain_timeout_s` for their requests; None: no time."""

    def __init__(
        self,
        config: AutoscaleConfig,
        client: Engine,
        admission: Admission,
        metrics: AutoscalerMetrics,
        *,
        drain_timeout_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._client = client
        self._admission = admission
        self._metrics = metrics
        self._drain_timeout_s = drain_timeout_s
        self._clock = clock
        self._state = State()
        self._now: dict[str, Any] | None = None
        self._last: dict[str, Any] | None = None
        self._error: str | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """It looks for as long as the block runs."""
        task = asyncio.create_task(self._run(), name="autoscaler")
        task.add_done_callback(self._on_end)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(INTERVAL_S)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """The ranks serve on without it, and whoever looks is told."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = f"{type(error).__name__}: {error}"
            log.error("the autoscaler has ended; the number of ranks stays as it is", exc_info=error)

    def look(self) -> None:
        """Decide for this moment, and begin what is decided. A server that is shutting down stays as it is."""
        if self._admission.draining:
            return
        seen = Observation(now_s=self._clock(), wait_s=self._admission.estimated_wait_s(), ranks=self._client.usage())
        self._follow_last()
        num_undone = self._state.num_undone
        self._state, decision = decide(self._config, self._state, seen)
        if self._state.num_undone > num_undone:
            self._metrics.undone()
        if (load := decision.numbers["load"]) is not None:
            self._metrics.set_load(load)
        self._now = _told(decision)
        if decision.action != "hold":
            self._carry_out(decision)

    def status(self) -> dict[str, Any]:
        """What `GET /elastic/status` says of it. Times are seconds since the epoch of Unix."""
        limits = {name.removesuffix("_size"): value for name, value in msgspec.structs.asdict(self._config).items()}
        state = self._state
        return {
            **limits,
            "now": self._now,
            "last_decision": self._last,
            "not_before": {"grow": self._unix(state.grow_at_s), "shrink": self._unix(state.shrink_at_s)},
            "num_undone": state.num_undone,
            "error": self._error,
        }

    def _carry_out(self, decision: Decision) -> None:
        self._metrics.decided(decision.action)
        last = self._last = {**_told(decision), "operation_id": None, "phase": None, "error": None}
        log.info(
            "%s to %d ranks from %d: %s",
            f"would {decision.action}" if self._config.dry_run else decision.action,
            *(decision.size, decision.from_size, decision.reason),
            extra={"fields": last},
        )
        if self._config.dry_run:
            return
        try:
            document = self._client.operations.request(
                size=decision.size, drain_timeout_s=self._drain_timeout_s, origin="autoscaler"
            )
        except NobiruError as error:
            last["error"] = error.message
            log.warning("a change to %d ranks was refused: %s", decision.size, error.message)
        else:
            last.update(operation_id=document["operation_id"], phase=document["phase"])

    def _follow_last(self) -> None:
        """What has become of the operation of the last decision."""
        last = self._last
        if last is None or last["operation_id"] is None or last["phase"] in ENDED:
            return
        document = self._client.operations.document(last["operation_id"])
        last.update(phase=document["phase"], error=document["error"])
        if last["phase"] in ENDED and last["phase"] != "done":
            log.warning("the change to %d ranks was undone: %s", last["to_ranks"], last["error"])

    def _unix(self, at_s: float) -> float | None:
        return round(time.time() + at_s - self._clock(), 3) if math.isfinite(at_s) else None


def _told(decision: Decision) -> dict[str, Any]:
    return {
        "time": round(time.time(), 3),
        "action": decision.action,
        "from_ranks": decision.from_size,
        "to_ranks": decision.size,
        "reason": decision.reason,
        "numbers": dict(decision.numbers),
    }
