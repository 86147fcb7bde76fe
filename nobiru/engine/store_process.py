"""The server's side of the rendezvous store: keeps its process running, and knows where it is.

Groups that stand do not need the store; the next formation does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from nobiru.engine.rank_spec import StoreSpec
from nobiru.engine.supervisor import RankProcess

logger = logging.getLogger(__name__)

RETRY_S = 1.0
STOP_TIMEOUT_S = 5.0


class StoreProcess:
    """Runs from `start` to `stop`; `address` is None until the store has said that it is ready."""

    def __init__(self, endpoint: str, host: str, launch: Callable[[StoreSpec], RankProcess]) -> None:
        self.address: tuple[str, int] | None = None
        self._spec = StoreSpec(endpoint=endpoint, host=host)
        self._launch = launch
        self._process: RankProcess | None = None
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._watch = asyncio.create_task(self._keep(), name="store")

    async def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._process is not None:
            self._process.close()
            await asyncio.to_thread(self._process.join, STOP_TIMEOUT_S)

    async def _keep(self) -> None:
        while True:
            process = self._process = self._launch(self._spec)
            self._spec = msgspec.structs.replace(self._spec, is_restart=True)
            how = await process.wait_dead()
            logger.error("the rendezvous store %s", how)
            self.address = None
            process.close()
            await asyncio.sleep(RETRY_S)
