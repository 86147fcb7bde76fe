"""This rank's part in an epoch of expert-parallel ranks, which step together.

Owns the number of the next step and what members agree upon. Every step begins with one small all-gather, which says
who has work; whoever has none computes for the others with an idle step. When nobody has work all sleep, until one of
them is given some. Knows nothing of requests.

Of a rank with several workers this is the leader's: the all-gather is the leaders', and the other workers are told, in
the order of the leader's own doing, what they have to do too. All leave the epoch when one meets an error.
"""

from __future__ import annotations

import time
from typing import Literal

import torch
from torch import Tensor

from nobiru.engine.expert_moves import ExpertMoves
from nobiru.engine.expert_worker import ExpertWorker
from nobiru.engine.messages import Abandon, Begin, ExpertLoads, Forget, Form, Formed, Parked, Suspended
from nobiru.engine.team import Team
from nobiru.engine.team_messages import CollectLoads, IdleStep, ToWorker
from nobiru.engine.team_moves import TeamMoves
from nobiru.scheduler import Plan

# The fields of the record that every step begins with.
RECORD = ("attempt", "epoch", "seq", "num_tokens", "has_work", "armed", "placement_version", "graph_bucket")
_HAS_WORK = RECORD.index("has_work")
_ARMED = RECORD.index("armed")
_VERSION = RECORD.index("placement_version")
# Steps between two reports of where tokens went.
LOADS_INTERVAL = 16
SAY_AGAIN_S = 10.0


class ExpertMember:
    """`prepare`, `begin`, then each step `gather` and, without work of its own, `run_idle`; `leave` at a `GroupError`.

    An attempt is prepared beside the steps of the epoch that lives; `take_prepared` says how that ended. Once `armed`
    like all other members, a gather parks this one instead of opening a step, until `begin` or `forget`. `break_out`
    may be called from another thread. `own` is the leader's part as a worker, `team` are the others, if there are any.
    """

    def __init__(self, own: ExpertWorker, team: Team | None = None) -> None:
        self._own = own
        self._team = team
        self._preparing = 0  # the attempt, while any worker is at it
        self._formed: list[Formed] = []
        self._reminder: Suspended | Parked | None = None
        self._said_s = 0.0  # on the monotonic clock
        self._collected_LE: Tensor | None = None
        self.moves: ExpertMoves | TeamMoves | None = None  # of the present epoch
        self.armed = 0  # for this attempt
        self.is_parked = False
        self.has_applied = False  # the epoch's first gather has completed
        self.seq = 0
        self.is_asleep = False
        self.has_switched = False  # to another placement, with the last gather
        self.num_unreported = 0  # steps whose loads were not taken
        self.is_before_step = True  # the step that failed had only begun: its plan was not executed

    @property
    def epoch(self) -> int | None:
        """The epoch in which this rank steps with others."""
        return None if self._own.epoch is None else self._own.epoch.number

    @property
    def attempt(self) -> int | None:
        """That which led to the epoch."""
        return None if self._own.epoch is None else self._own.epoch.attempt

    # ---- attempts ----------------------------------------------------------------------------------------------------

    @property
    def is_preparing(self) -> bool:
        return self._preparing != 0

    def prepare(self, form: Form) -> None:
        """Fill slots and build the groups of an attempt, with all its members at once."""
        self._disarm(form.attempt - 1)
        if form.leave:
            self.leave()
        self._preparing, self._formed = form.attempt, []
        self._tell(form)
        self._own.prepare(form)

    def take_prepared(self) -> Formed | None:
        """How preparing has ended, once it has on all workers, or failed on one."""
        found = [] if self._team is None else self._team.take(Formed)
        if (own := self._own.take_prepared()) is not None:
            found.append(own)
        self._formed += [each for each in found if each.attempt == self._preparing]
        failed = next((each for each in self._formed if each.error is not None), None)
        num_workers = 1 if self._team is None else self._team.size
        if not self._preparing or (failed is None and len(self._formed) < num_workers):
            return None
        outcome = failed or Formed(attempt=self._preparing)
        self._preparing, self._formed = 0, []
        return outcome

    def begin(self, attempt: int) -> None:
        """Switch to the attempt's epoch: its members are prepared, and those of the epoch before have parked."""
        if not self._own.is_prepared(attempt):
            return
        self._tell(Begin(attempt=attempt))
        self._own.begin(attempt)
        self._reset()
        own_moves = self._own.present.moves
        self.moves = own_moves if self._team is None else TeamMoves(own_moves, self._team)
        self.seq = 0
        self._remind(None)
        self.is_asleep = self.has_applied = False

    def arm(self, attempt: int) -> None:
        """Be ready for the attempt at the next gather, which others may be waiting in."""
        self.armed = attempt
        self.is_asleep = False

    def forget(self, attempt: int) -> None:
        """Whatever belongs to this attempt or earlier ones never was; who has parked for it goes on."""
        self._tell(Forget(attempt=attempt))
        self._own.forget(attempt)
        self._disarm(attempt)

    def _disarm(self, attempt: int) -> None:
        if self._preparing <= attempt:
            self._preparing = 0
        if self.armed <= attempt:
            if self.is_parked:
                self._remind(None)
            self.armed, self.is_parked = 0, False

    def leave(self, error: str | None = None) -> None:
        """Leave the epoch; whoever is still in one of its exchanges gets a `GroupError`.

        With the `error` of an exchange that failed here, `take_reminder` tells of it.
        """
        attempt, epoch = self.attempt, self.epoch
        if epoch is not None:
            self._remind(None if error is None else Suspended(epoch=epoch, error=error))
        self._own.leave()
        self._reset()
        if attempt is not None:
            self._tell(Abandon(attempt=attempt))

    def take_reminder(self) -> Suspended | Parked | None:
        """What the controller has to hear of a rank that stands still: it has parked, or an exchange has failed.

        At once, and again for as long as it stands: a message may get lost, and nobody else need know.
        """
        now_s = time.monotonic()
        if self._reminder is None or now_s < self._said_s + SAY_AGAIN_S:
            return None
        self._said_s = now_s
        return self._reminder

    def _remind(self, of: Suspended | Parked | None) -> None:
        self._reminder, self._said_s = of, -SAY_AGAIN_S

    def _reset(self) -> None:
        self.armed, self.is_parked, self.has_switched = 0, False, False
        self.moves, self.num_unreported, self._collected_LE = None, 0, None

    def break_out(self, attempt: int) -> None:
        """End the exchanges of an attempt that is over, in which this rank may be stuck."""
        self._own.break_out(attempt)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def gather(self, plan: Plan | None) -> Literal["step", "sleep", "park"]:
        """Begin a step with the others. When nobody has work all sleep from now on; when all are armed all park."""
        epoch, moves = self._own.present, self.moves
        assert moves is not None
        self.is_before_step = True
        record = torch.tensor(
            [
                epoch.attempt,
                epoch.number,
                self.seq,
                0 if plan is None else plan.num_tokens,
                plan is not None,
                self.armed,
                moves.ready_version,
                0,
            ],
            dtype=torch.int64,
        )
        records_Rn = epoch.groups["control"].all_gather_record(record)
        assert bool((records_Rn[:, :3] == record[:3]).all()), "members are in the same step of the same epoch"
        self.seq += 1
        self.num_unreported += 1
        self.is_asleep = not bool(records_Rn[:, _HAS_WORK].any())
        self.has_switched = int(records_Rn[:, _VERSION].min()) > moves.version
        if self.has_switched:
            moves.switch()
        if self._loads_are_due:
            self._tell(CollectLoads())
            self._collected_LE = self._own.collect_loads()
        if self.armed and bool((records_Rn[:, _ARMED] == self.armed).all()):
            self.is_parked = True
            self._remind(Parked(attempt=self.armed))
            return "park"
        self.is_before_step = False
        return "sleep" if self.is_asleep else "step"

    def take_loads(self) -> ExpertLoads | None:
        """Tokens routed by this rank since the last call, after every `LOADS_INTERVAL` steps and before sleep."""
        counts_LE, self._collected_LE = self._collected_LE, None
        if counts_LE is None:
            return None
        loads = ExpertLoads(
            num_steps=self.num_unreported,
            shape=(counts_LE.shape[0], counts_LE.shape[1]),
            counts=counts_LE.numpy().tobytes(),
        )
        self.num_unreported = 0
        return loads

    @property
    def _loads_are_due(self) -> bool:
        return self.num_unreported > 0 and (self.num_unreported >= LOADS_INTERVAL or self.is_asleep)

    def run_idle(self) -> None:
        """Take part in a step without tokens of one's own."""
        self._tell(IdleStep())
        self._own.run_idle()

    def wake(self, epoch: int, seq: int) -> None:
        """Another member waits in step `seq`; a call for any other step is late."""
        if epoch == self.epoch and seq == self.seq:
            self.is_asleep = False

    def _tell(self, message: ToWorker) -> None:
        if self._team is not None:
            self._team.tell(message)
