"""The supervisor's decisions, with processes that only pretend."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from nobiru.engine.messages import Crashed, Loaded, StartFailed
from nobiru.engine.recorder import FlightRecorder
from nobiru.engine.supervisor import Rank, RankSupervisor, backoff_s


class PretendedProcess:
    """Dies when `die` is called."""

    pid = 1
    node = "here"

    def __init__(self) -> None:
        self.dead = asyncio.Event()

    async def wait_dead(self) -> str:
        await self.dead.wait()
        return "was killed by a test"

    def kill(self) -> None:
        self.dead.set()

    def close(self) -> None:
        self.dead.set()

    def join(self, timeout_s: float) -> bool:
        return True


class Stage:
    """A supervisor, its rank, and what it said."""

    def __init__(self, *, rank_timeout_s: float = 60.0) -> None:
        recorder = FlightRecorder.create(4)
        recorder.step_begins([7])
        self.process = PretendedProcess()
        self.rank = Rank(rank_id="r5", process=self.process, recorder=recorder)
        self.lost: list[tuple[str, list[int]]] = []
        self.loaded: list[str] = []
        self.supervisor = RankSupervisor(
            self.rank,
            rank_timeout_s=rank_timeout_s,
            on_loaded=lambda rank, message: self.loaded.append(rank.rank_id),
            on_lost=self.on_lost,
        )

    def on_lost(self, rank: Rank, executing: Sequence[int]) -> None:
        self.lost.append((rank.rank_id, list(executing)))


def play(stage: Stage, die: Any) -> None:
    async def main() -> None:
        watch = stage.supervisor.start()
        die()
        await asyncio.wait_for(watch, 5)

    asyncio.run(main())


def test_back_off_doubles_after_the_first_death() -> None:
    assert [backoff_s(number) for number in range(1, 5)] == [0.0, 0.5, 1.0, 2.0]
    assert backoff_s(50) == 60.0


def test_what_a_dead_rank_was_executing_is_told() -> None:
    stage = Stage()

    def die() -> None:
        stage.supervisor.loaded(Loaded(max_num_batched_tokens=1, info={}, worker_pids=[1, 2]))
        assert (stage.rank.state, stage.rank.worker_pids) == ("serving", [1, 2])
        stage.process.kill()

    play(stage, die)
    assert stage.loaded == ["r5"]
    assert stage.lost == [("r5", [7])]
    assert (stage.rank.state, stage.rank.cause) == ("dead", "was killed by a test")


def test_a_rank_may_say_why_it_ends() -> None:
    for message, cause in (
        (StartFailed(message="no such file", permanent=True), "no such file"),
        (StartFailed(message="no such file", permanent=False), "was killed by a test: no such file"),
        (Crashed(message="a bug"), "was killed by a test: a bug"),
    ):
        stage = Stage()

        def die(stage: Stage = stage, message: StartFailed | Crashed = message) -> None:
            stage.supervisor.says_why(message)
            stage.process.kill()

        play(stage, die)
        assert stage.rank.cause == cause
        assert stage.rank.permanent == getattr(message, "permanent", False)


def test_a_silent_rank_is_killed() -> None:
    stage = Stage(rank_timeout_s=1.2)
    play(stage, stage.rank.recorder.beat)  # type: ignore[attr-defined]
    assert "no sign of life" in (stage.rank.cause or "")
    assert stage.lost


def test_a_rank_that_is_ended_is_not_lost() -> None:
    stage = Stage()

    async def main() -> None:
        stage.supervisor.start()
        await asyncio.sleep(0)
        await stage.supervisor.stop()

    asyncio.run(main())
    assert stage.process.dead.is_set()
    assert stage.lost == []
    assert stage.rank.state == "dead"
