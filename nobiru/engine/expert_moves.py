"""A rank's part in moving experts: copying beside serving, then the switch that all members make in the same step.

Owns the placement in use, its version, and the thread that copies. What is copied lies in slots that the placement in
use does not name, so nothing that serves changes until the switch, and the switch rewrites tables only.
"""

from __future__ import annotations

import threading

import numpy as np

from nobiru.engine.messages import Moved, MoveExperts
from nobiru.errors import NobiruError
from nobiru.models.moe import MoeParts
from nobiru.parallel.dispatch import ExpertTables
from nobiru.parallel.groups import Group
from nobiru.parallel.placement import EMPTY, Move, Placement
from nobiru.parallel.transfer import Transfer


class ExpertMoves:
    """`begin`, and once `outcome` is there and all members announce `ready_version`, `switch`."""

    def __init__(
        self,
        moe: MoeParts,
        group: Group,
        tables: ExpertTables,
        placement: Placement,
        *,
        version: int,
        max_bytes_per_s: int | None,
    ) -> None:
        self.placement = placement
        self.version = version
        self.ready_version = version
        self._moe = moe
        self._group = group
        self._tables = tables
        self._transfer = Transfer(group, moe.banks, max_bytes_per_s=max_bytes_per_s)
        self._next: tuple[MoveExperts, Placement] | None = None
        self._outcome: Moved | None = None
        self._thread: threading.Thread | None = None

    def begin(self, message: MoveExperts) -> None:
        """Start to copy. One move at a time: the controller waits for the one before."""
        after = Placement(
            slots=np.frombuffer(message.slots, dtype="<i4").reshape(message.shape),
            num_experts=self.placement.num_experts,
        )
        self.ready_version = self.version
        self._next = (message, after)
        self._thread = threading.Thread(target=self._copy, args=(message,), name="expert-moves", daemon=True)
        self._thread.start()

    def take_outcome(self) -> Moved | None:
        """How copying ended, once it has; from the next step on the member announces that it is ready."""
        outcome, self._outcome = self._outcome, None
        if outcome is not None and outcome.error is None:
            self.ready_version = outcome.version
        return outcome

    def switch(self) -> None:
        """All members are ready: use the new placement."""
        assert self._next is not None and self._next[0].version == self.ready_version
        message, after = self._next
        self._tables.switch(message.layer, after)
        self.placement, self.version, self._next = after, message.version, None

    def vacate(self, version: int) -> None:
        """All members have switched: forget what lies in slots that are empty now."""
        if version != self.version:
            return
        for layer, slots_S in enumerate(self.placement.slots[:, self._group.rank]):
            for slot in np.flatnonzero(slots_S == EMPTY).tolist():
                self._moe.banks[layer].vacate(slot)

    def _copy(self, message: MoveExperts) -> None:
        moves = [_move(message.layer, numbers) for numbers in message.moves]
        try:
            received = self._transfer.run(moves)
        except NobiruError as error:
            self._group.destroy()
            self._outcome = Moved(version=message.version, num_bytes=0, error=str(error))
        else:
            self._outcome = Moved(version=message.version, num_bytes=len(received) * self._moe.expert_bytes)


def _move(layer: int, numbers: tuple[int, ...]) -> Move:
    expert, from_rank, from_slot, to_rank, to_slot = numbers
    return Move(layer=layer, expert=expert, from_rank=from_rank, from_slot=from_slot, to_rank=to_rank, to_slot=to_slot)
