"""The expert-parallel ranks of one server, as their controller sees them.

Owns the store's process, the formation of epochs, and the passing on of wake-up calls; which expert is where is
`ExpertBalance`'s. Runs on the server's event loop; sending is the client's. Decisions are those of
`nobiru.elastic.formation`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nobiru.elastic.formation import Action, Formation, SendAbandon, SendBegin, SendForm, SetTimer
from nobiru.engine import messages
from nobiru.engine.expert_balance import ExpertBalance
from nobiru.engine.messages import (
    Abandon,
    Awake,
    Begin,
    ExpertLoads,
    Form,
    Formed,
    Inventory,
    Moved,
    StoreReady,
    Suspended,
    Switched,
    Wake,
)
from nobiru.engine.rank_spec import control_identity
from nobiru.engine.store_process import StoreProcess

logger = logging.getLogger(__name__)

FromMember = Formed | Suspended | Awake | ExpertLoads | Moved | Switched
Send = Callable[[str, messages.ToRank], None]


class ExpertGroup:
    """`size` ranks that step together. `send(identity, message)` reaches one; `on_begin(rank ids)` hears of epochs."""

    def __init__(
        self,
        *,
        size: int,
        endpoint: str,
        host: str,
        environment: Mapping[str, str],
        send: Send,
        on_begin: Callable[[Iterable[str]], None],
        balance: ExpertBalance,
    ) -> None:
        self._formation = Formation(size=size)
        self.balance = balance
        self._store = StoreProcess(endpoint, host, environment)
        self._send = send
        self._on_begin = on_begin
        self._positions: dict[str, int] = {}
        self._store_address = ("", 0)
        self._timers: set[asyncio.TimerHandle] = set()

    # ---- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._store.start()

    async def stop(self) -> None:
        for timer in self._timers:
            timer.cancel()
        await self._store.stop()

    # ---- what happens ------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self._formation.epoch

    @property
    def is_serving(self) -> bool:
        return self._formation.phase == "serving"

    def store_is_ready(self, message: StoreReady) -> None:
        self._store_address = (message.host, message.port)
        self._perform(self._formation.store_is_ready())

    def rank_loaded(self, rank_id: str, position: int, inventory: Inventory) -> None:
        self.balance.rank_loaded(position, inventory)
        self._positions[rank_id] = position
        self._perform(self._formation.rank_loaded(position, rank_id))

    def rank_lost(self, rank_id: str) -> None:
        self._positions.pop(rank_id, None)
        self.balance.epoch_ends()
        self._perform(self._formation.rank_lost(rank_id))

    def handle(self, rank_id: str, message: FromMember) -> None:
        position = self._positions.get(rank_id)
        match message:
            case ExpertLoads() | Moved() | Switched() if position is not None and self.is_serving:
                for order in self.balance.handle(position, message):
                    for member in self._formation.members:
                        self._send(member, order)
            case Formed(error=None):
                self._perform(self._formation.rank_formed(rank_id, message.attempt))
            case Formed():
                logger.warning("rank %s could not form a group: %s", rank_id, message.error)
                self._perform(self._formation.form_failed(rank_id, message.attempt))
            case Suspended():
                self.balance.epoch_ends()
                self._perform(self._formation.rank_suspended(rank_id, message.epoch))
            case Awake():
                if message.epoch == self.epoch and self.is_serving:
                    for other in self._formation.members:
                        if other != rank_id:
                            self._send(other, Wake(epoch=message.epoch, seq=message.seq))

    def status(self) -> dict[str, Any]:
        """The part of `GET /elastic/status` that is about experts."""
        return self.balance.status(self._positions)

    # ---- actions -----------------------------------------------------------------------------------------------------

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case SendForm():
                    self._send_form(action)
                case SendBegin():
                    for rank_id in action.members:
                        self._send(rank_id, Begin(attempt=action.attempt))
                    logger.info("epoch %d begins with %s", action.epoch, ", ".join(action.members))
                    self.balance.epoch_begins()
                    self._on_begin(action.members)
                case SendAbandon():
                    for rank_id in action.members:
                        self._send(control_identity(rank_id), Abandon(attempt=action.attempt))
                case SetTimer():
                    loop = asyncio.get_running_loop()
                    self._timers = {timer for timer in self._timers if timer.when() > loop.time()}
                    self._timers.add(loop.call_later(action.seconds, self._on_timer, action.attempt))

    def _on_timer(self, attempt: int) -> None:
        self._perform(self._formation.timer(attempt))

    def _send_form(self, action: SendForm) -> None:
        placement = self.balance.placement
        assert placement is not None, "every rank is loaded"
        host, port = self._store_address
        for position, rank_id in enumerate(action.members):
            form = Form(
                attempt=action.attempt,
                epoch=action.epoch,
                position=position,
                size=len(action.members),
                store_host=host,
                store_port=port,
                version=self.balance.version,
                shape=(placement.num_layers, placement.num_ranks, placement.slot_capacity),
                slots=placement.slots.astype("<i4").tobytes(),
            )
            self._send(rank_id, form)
