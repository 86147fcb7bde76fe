"""Moves of experts on a rank with several workers, as if it were one: the leader's view.

Owns adding up what the workers have done. Each copies into its own slots; the rank is ready when all of them are, and
they switch before the step in which their leader does.
"""

from __future__ import annotations

from nobiru.engine.expert_moves import ExpertMoves
from nobiru.engine.messages import Moved, MoveExperts, Vacate
from nobiru.engine.team import Team
from nobiru.engine.team_messages import Switch


class TeamMoves:
    """Used as the leader's `own` `ExpertMoves` would be."""

    def __init__(self, own: ExpertMoves, team: Team) -> None:
        self._own = own
        self._team = team
        self._outcomes: list[Moved] = []
        self.ready_version = own.version

    @property
    def version(self) -> int:
        """Of the placement in use."""
        return self._own.version

    def begin(self, message: MoveExperts) -> None:
        self._outcomes = []
        self.ready_version = self.version
        self._team.tell(message)
        self._own.begin(message)

    def take_outcome(self) -> Moved | None:
        """That of all workers, once the last has its own."""
        found = self._team.take(Moved)
        if (own := self._own.take_outcome()) is not None:
            found.append(own)
        self._outcomes += found
        if not found or len(self._outcomes) < self._team.size:
            return None
        version = self._outcomes[0].version
        errors = [each.error for each in self._outcomes if each.error is not None]
        if not errors:
            self.ready_version = version
        num_bytes = sum(each.num_bytes for each in self._outcomes)
        return Moved(version=version, num_bytes=num_bytes, error=errors[0] if errors else None)

    def switch(self) -> None:
        self._team.tell(Switch())
        self._own.switch()

    def vacate(self, version: int) -> None:
        self._team.tell(Vacate(version=version))
        self._own.vacate(version)
