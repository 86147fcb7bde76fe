"""The supervisor's decisions, with processes that only pretend."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from nobiru.engine.messages import Loaded, StartFailed
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
    """A supervisor, what it launched and what it said."""

    def __init__(self, *, rank_timeout_s: float = 60.0, max_start_failures: int = 3) -> None:
        self.processes: list[PretendedProcess] = []
        self.lost: list[tuple[str, list[int]]] = []
        self.loaded: list[str] = []
        self.supervisor = RankSupervisor(
            self.launch,
            rank_timeout_s=rank_timeout_s,
            max_start_failures=max_start_failures,
            on_loaded=lambda rank, message: self.loaded.append(rank.rank_id),
            on_lost=self.on_lost,
        )

    def launch(self, rank_id: str) -> tuple[PretendedProcess, FlightRecorder]:
        recorder = FlightRecorder.create(4)
        recorder.step_begins([len(self.processes)])
        self.processes.append(PretendedProcess())
        return self.processes[-1], recorder

    def on_lost(self, rank: Rank, executing: Sequence[int]) -> None:
        self.lost.append((rank.rank_id, list(executing)))

    async def until(self, num_launched: int) -> Rank:
        for _ in range(500):
            if len(self.processes) == num_launched and self.supervisor.rank is not None:
                return self.supervisor.rank
            await asyncio.sleep(0.01)
        raise AssertionError("not launched in time")


def test_back_off_doubles_after_the_first_death() -> None:
    assert [backoff_s(number) for number in range(1, 5)] == [0.0, 0.5, 1.0, 2.0]
    assert backoff_s(50) == 60.0


def test_a_dead_rank_is_replaced_and_what_it_was_executing_is_told() -> None:
    async def main() -> None:
        stage = Stage()
        stage.supervisor.start()
        first = await stage.until(1)
        stage.supervisor.loaded(first, Loaded(max_num_batched_tokens=1, info={}))
        stage.processes[0].kill()
        second = await stage.until(2)
        assert (first.rank_id, second.rank_id) == ("r0", "r1")
        assert stage.lost == [("r0", [0])]
        assert stage.loaded == ["r0"]
        assert stage.supervisor.num_restarts == 1
        await stage.supervisor.stop()

    asyncio.run(main())


@pytest.mark.parametrize(("permanent", "num_launches"), [(True, 1), (False, 2)])
def test_starts_that_fail_are_given_up(permanent: bool, num_launches: int) -> None:
    async def main() -> None:
        stage = Stage(max_start_failures=2)
        stage.supervisor.start()
        assert stage.supervisor.failed is not None
        for number in range(1, num_launches + 1):
            rank = await stage.until(number)
            stage.supervisor.says_why(rank, StartFailed(message="no such file", permanent=permanent))
            stage.processes[-1].kill()
        assert "no such file" in await asyncio.wait_for(stage.supervisor.failed, 5)
        assert len(stage.processes) == num_launches
        await stage.supervisor.stop()

    asyncio.run(main())


def test_a_silent_rank_is_killed() -> None:
    async def main() -> None:
        stage = Stage(rank_timeout_s=1.2)
        stage.supervisor.start()
        rank = await stage.until(1)
        rank.recorder.beat()
        await stage.until(2)
        assert rank.cause is not None
        assert "no sign of life" in rank.cause
        await stage.supervisor.stop()

    asyncio.run(main())


def test_an_error_in_a_task_that_serving_needs_is_not_silent() -> None:
    async def broken() -> None:
        raise ValueError("not a message")

    async def main() -> None:
        stage = Stage()
        stage.supervisor.start()
        assert stage.supervisor.failed is not None
        task = asyncio.create_task(broken(), name="rank-messages")
        task.add_done_callback(stage.supervisor.give_up_after)
        assert "rank-messages ended with ValueError" in await asyncio.wait_for(stage.supervisor.failed, 5)
        await stage.supervisor.stop()

    asyncio.run(main())
