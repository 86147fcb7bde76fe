"""Operations: changes of the ranks that somebody asks for, and those that happen; their history, and healing.

Owns what may be asked, what is remembered of each operation, and when a group that has lost ranks grows back. Decisions
about members are `nobiru.elastic.membership`'s; whatever it says is to be done goes to `perform`.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nobiru.config import EngineConfig
from nobiru.elastic import membership
from nobiru.elastic.membership import Action, Membership, Operation, Origin
from nobiru.elastic.records import OperationRecord
from nobiru.engine.planning import OperationPlan, Planning
from nobiru.engine.supervisor import backoff_s
from nobiru.errors import ConflictError, InvalidRequestError, NotFoundError

logger = logging.getLogger(__name__)

MAX_HEAL_FAILURES = 5
MAX_REMEMBERED = 1000
ROOM_POLL_S = 2.0


class Operations:
    """`request` and `cancel` change the membership, `document` and `documents` tell of it, and of the last
    `MAX_REMEMBERED` changes before.

    `num_places()` is how many ranks there is room for, which may change.
    `note_phases` is to be called whenever the machine has been told something, `heal_if_due` when that is settled.
    `states` gives the ranks' states by id; `later(seconds, call)` calls something, also `on_settled`, which is told
    when an operation is done.
    """

    def __init__(
        self,
        config: EngineConfig,
        machine: Membership,
        planning: Planning,
        *,
        perform: Callable[[Iterable[Action]], None],
        later: Callable[[float, Callable[[], None]], None],
        states: Callable[[], Mapping[str, str]],
        on_done: Callable[[], None],
        num_places: Callable[[], int],
    ) -> None:
        self._config = config
        self._machine = machine
        self._planning = planning
        self._perform = perform
        self._later = later
        self._states = states
        self._on_done = on_done
        self._records: dict[int, OperationRecord] = {}  # by number, newest last
        self._num_places = num_places
        self._will_heal = False
        self._num_heal_failures = 0

    @property
    def running(self) -> OperationRecord | None:
        """The record of the operation that is running."""
        operation = self._machine.operation
        return None if operation is None else self._records[operation.number]

    @property
    def max_size(self) -> int:
        """The most ranks that may be asked for."""
        return self._config.max_data_parallel_size or self._num_places()

    def request(
        self,
        *,
        size: int | None = None,
        remove: Sequence[str] = (),
        replace: Sequence[str] = (),
        drain_timeout_s: float | None = None,
        drain_may_replay: bool = True,
        deadline_s: float = 600.0,
        dry_run: bool = False,
        idempotency_key: str | None = None,
        origin: Origin = "user",
    ) -> dict[str, Any]:
        """Begin an operation; its document. Raises `InvalidRequestError` or `ConflictError`.

        A user's takes the place of the autoscaler's, if that is not committed yet.
        """
        for record in self._records.values():
            if idempotency_key is not None and record.idempotency_key == idempotency_key:
                return self._document(record)
        size = self._checked_size(size, remove, replace)
        gone = (*remove, *replace)
        machine = self._machine
        takes_over = origin == "user" and machine.operation is not None and machine.operation.origin == "autoscaler"
        if not dry_run and not takes_over:
            self._refuse_while_busy()
        plan = self._planning.plan(machine.members, self._members_after(size, gone), pauses_s=self._pauses_s)
        target = {"data_parallel_size": size, "remove_ranks": list(remove), "replace_ranks": list(replace)}
        if dry_run:
            return dry_run_document(target, plan)
        if plan.problem is not None:
            raise plan.problem
        if takes_over:
            self._perform(machine.cancel("a user asked for another change"))
            self._refuse_while_busy()
        actions = machine.request(
            size=size, remove=gone, origin=origin, drain_timeout_s=drain_timeout_s, drain_may_replay=drain_may_replay
        )
        record = self._note_new(machine.latest, target, idempotency_key, plan)
        self._later(deadline_s, lambda: self._on_deadline(record))
        self._perform(actions)
        return self._document(record)

    def _refuse_while_busy(self) -> None:
        if self.is_busy:
            number = "" if self.running is None else f" ({self.running.operation_id})"
            raise ConflictError(f"another change of the ranks is running{number}; wait for its end, or cancel it")

    @property
    def is_busy(self) -> bool:
        """Whether the membership is changing."""
        return self._machine.operation is not None or not self._machine.lives

    @property
    def is_settled(self) -> bool:
        """Whether the membership stays as it is until somebody asks, or dies: nothing is to be healed either."""
        machine = self._machine
        can_heal = self._config.self_heal and self._num_heal_failures < MAX_HEAL_FAILURES
        return not self.is_busy and (len(machine.members) >= self._healing_size or not can_heal)

    def cancel(self, operation_id: str) -> dict[str, Any]:
        """Undo an operation before its commit; `ConflictError` when it is too late."""
        record = self._find(operation_id)
        actions = self._machine.cancel("cancelled") if self._machine.operation is record.operation else []
        if not actions:
            raise ConflictError(
                f"operation {operation_id} is {record.operation.phase}; it cannot be cancelled any more"
            )
        self._perform(actions)
        return self._document(record)

    def document(self, operation_id: str) -> dict[str, Any]:
        return self._document(self._find(operation_id))

    def documents(self) -> list[dict[str, Any]]:
        """All remembered operations, newest last."""
        return [self._document(record) for record in self._records.values()]

    def _on_deadline(self, record: OperationRecord) -> None:
        if self._machine.operation is record.operation:
            self._perform(self._machine.cancel("the deadline has passed"))

    def heal_if_due(self) -> None:
        """Grow back towards the size that was asked for, some time after a failure."""
        if self._is_heal_due and not self._will_heal:
            self._will_heal = True
            has_room = self._healing_size > len(self._machine.members)
            self._later(backoff_s(self._num_heal_failures + 1) if has_room else ROOM_POLL_S, self._heal)

    @property
    def _is_heal_due(self) -> bool:
        """Whether ranks are missing, and nobody is doing anything about it."""
        if not self._config.self_heal or self.is_busy or self._num_heal_failures >= MAX_HEAL_FAILURES:
            return False
        return len(self._machine.members) < self._machine.desired_size

    @property
    def _healing_size(self) -> int:
        """What is wanted, or as much of it as there is room for."""
        return min(self._machine.desired_size, self._num_places())

    def _heal(self) -> None:
        self._will_heal = False
        machine, size = self._machine, self._healing_size
        if not self._is_heal_due:  # whatever makes it due again asks again
            return
        if size <= len(machine.members):
            self.heal_if_due()
            return
        plan = self._planning.plan(machine.members, self._members_after(size, ()), pauses_s=self._pauses_s)
        if plan.problem is not None:
            self._note_heal_failure(plan.problem.message)
            self.heal_if_due()
            return
        actions = machine.request(size=size, origin="heal")
        self._note_new(machine.latest, {"data_parallel_size": size}, None, plan)
        self._perform(actions)

    def _note_heal_failure(self, cause: str) -> None:
        self._num_heal_failures += 1
        if self._num_heal_failures >= MAX_HEAL_FAILURES:
            logger.error("%d tries to replace ranks failed; not trying again: %s", MAX_HEAL_FAILURES, cause)
        else:
            logger.warning("ranks could not be replaced: %s", cause)

    # ---- records -----------------------------------------------------------------------------------------------------

    def _note_new(
        self,
        operation: Operation | None,
        target: dict[str, Any],
        idempotency_key: str | None,
        plan: OperationPlan | None = None,
    ) -> OperationRecord:
        assert operation is not None
        record = OperationRecord(
            operation=operation,
            operation_id=f"op-{operation.number}-{uuid.uuid4().hex[:8]}",
            from_epoch=self._machine.epoch,
            target=target,
            plan=None if plan is None else plan.document,
            idempotency_key=idempotency_key,
        )
        if operation.origin == "failure":
            record.stopped_s = self._stopped_s()
        self._records[operation.number] = record
        for number in list(self._records)[: -MAX_REMEMBERED - 1]:
            del self._records[number]
        return record

    def _stopped_s(self) -> float:
        """Since when the group stands still that a failure has stopped: it may have been parked already."""
        before = next(reversed(self._records.values()), None)
        has_just_ended = before is not None and before.operation.has_ended and not before.is_ended
        return before.stopped_s if before is not None and has_just_ended and before.stopped_s else time.monotonic()

    def note_phases(self) -> None:
        now_s = time.time()
        latest = self._machine.latest
        if latest is not None and latest.number not in self._records:
            self._note_new(latest, {"data_parallel_size": latest.size}, None)
        for number in list(self._records)[-2:]:  # an event ends one at most, and begins one
            record = self._records[number]
            was_ended = record.is_ended
            record.note_phase(now_s)
            if record.is_ended and not was_ended:
                self._note_end(record)

    def _note_end(self, record: OperationRecord) -> None:
        operation = record.operation
        if operation.phase == "done":
            record.to_epoch = self._machine.epoch
            # Ranks that do not step together stand still for nobody.
            record.pause_s = 0.0 if record.stopped_s is None else round(time.monotonic() - record.stopped_s, 6)
            if operation.origin in membership.PLANNED:
                self._num_heal_failures = 0
            self._on_done()
        elif operation.origin == "heal":
            self._note_heal_failure(operation.error or "undone")
        logger.info(
            "operation %s (%s): %s %s", record.operation_id, operation.origin, operation.phase, operation.error or ""
        )

    def _document(self, record: OperationRecord) -> dict[str, Any]:
        record.ranks = dict(self._states())
        return record.document(time.time())

    def _find(self, operation_id: str) -> OperationRecord:
        for record in self._records.values():
            if record.operation_id == operation_id:
                return record
        raise NotFoundError(f"there is no operation {operation_id[:100]!r}", code="operation_not_found")

    # ---- what may be asked -------------------------------------------------------------------------------------------

    def _checked_size(self, size: int | None, remove: Sequence[str], replace: Sequence[str]) -> int:
        members = self._machine.members
        for name, ranks in (("remove_ranks", remove), ("replace_ranks", replace)):
            if unknown := [rank for rank in ranks if rank not in members]:
                raise InvalidRequestError(
                    f"{name} names {', '.join(map(str, unknown))}; the ranks are {', '.join(members)}", param=name
                )
        if size is None:
            size = len(members) - len(remove)
            if size < self._config.min_survivable_size:
                raise InvalidRequestError(
                    f"remove_ranks would leave {size} ranks; at least {self._config.min_survivable_size} must stay",
                    param="remove_ranks",
                )
        least = self._config.min_survivable_size
        if not least <= size <= self.max_size:
            raise InvalidRequestError(
                f"data_parallel_size is {size}; it must be from {least} to {self.max_size} "
                "(min_survivable_size, max_data_parallel_size)",
                param="data_parallel_size",
            )
        return size

    def _members_after(self, size: int, gone: Sequence[str]) -> list[str]:
        """Who stays of the present members, and names for those that would be new."""
        stay = [rank for rank in self._machine.members if rank not in gone][:size]
        return [*stay, *(f"new-{number}" for number in range(size - len(stay)))]

    @property
    def _pauses_s(self) -> list[float]:
        """Of planned changes, oldest first."""
        planned = [record for record in self._records.values() if record.operation.origin in membership.PLANNED]
        return [record.pause_s for record in planned if record.pause_s is not None]


def dry_run_document(target: dict[str, Any], plan: OperationPlan) -> dict[str, Any]:
    """What an operation would do; `error` says why it would be refused."""
    return {
        "operation_id": None,
        "phase": "planning",
        "dry_run": True,
        "target": target,
        "plan": plan.document,
        "error": None if plan.problem is None else plan.problem.message,
    }
