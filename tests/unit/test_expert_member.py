"""A rank's part in an epoch: what it tells of an exchange that failed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from nobiru.engine import expert_member
from nobiru.engine.expert_member import SAY_AGAIN_S, ExpertMember
from nobiru.engine.expert_worker import ExpertWorker
from nobiru.engine.messages import Suspended


class Worker:
    """Enters and leaves epochs as it is told."""

    def __init__(self) -> None:
        self.epoch: SimpleNamespace | None = None

    @property
    def present(self) -> SimpleNamespace:
        assert self.epoch is not None
        return self.epoch

    def is_prepared(self, attempt: int) -> bool:
        return True

    def begin(self, attempt: int) -> None:
        self.epoch = SimpleNamespace(attempt=attempt, number=attempt, moves=None)

    def leave(self) -> None:
        self.epoch = None


def test_that_it_has_left_its_epoch_is_told_again_until_another_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 3.0
    monkeypatch.setattr(expert_member.time, "monotonic", lambda: now_s)
    member = ExpertMember(cast(ExpertWorker, Worker()))
    member.begin(1)
    assert member.take_reminder() is None
    member.leave("closed")
    told = Suspended(epoch=1, error="closed")
    assert member.take_reminder() == told
    assert member.take_reminder() is None
    now_s += SAY_AGAIN_S
    assert member.take_reminder() == told
    now_s += SAY_AGAIN_S
    member.begin(2)
    assert member.take_reminder() is None
    member.leave()
    assert member.take_reminder() is None, "it was told to leave"
