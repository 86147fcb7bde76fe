"""Ranks come and go while texts are written: no token is lost, twice or different, and nobody notices a pause."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from elastic_scenes import GREEDY, SPREAD, ended, members, play, stopped_at, undisturbed_texts, whole
from generation_requests import PROMPTS, generation, text_of
from ranks import is_alive, running, until

from nobiru.engine.client import ZmqClient
from nobiru.errors import ConflictError, InvalidRequestError, NotFoundError

MAX_PAUSE_S = 2.0  # far above what it is, for loaded machines


@pytest.fixture(scope="module")
def expected(moe_model: Path) -> list[list[int]]:
    return undisturbed_texts(moe_model)


def test_the_group_grows_and_shrinks_to_one_and_back(moe_model: Path, expected: list[list[int]]) -> None:
    async def scene(client: ZmqClient) -> None:
        pids = {rank["rank_id"]: rank["pid"] for rank in client.status()["ranks"]}
        for number, size in enumerate((3, 1, 2), start=2):
            document = client.operations.request(size=size)
            document = await ended(client, document["operation_id"])
            assert document["phase"] == "done"
            assert document["to_epoch"] == number
            assert 0 < document["pause_seconds"] < MAX_PAUSE_S
            assert len(members(client)) == size
        assert members(client)[0] == "r0"
        assert client.status()["ranks"][0]["pid"] == pids["r0"], "who stays keeps its process"
        assert not is_alive(pids["r1"])

    play(moe_model, expected, scene)


def test_named_ranks_are_removed_and_replaced(moe_model: Path, expected: list[list[int]]) -> None:
    async def scene(client: ZmqClient) -> None:
        document = client.operations.request(replace=["r0"], idempotency_key="one")
        assert (
            client.operations.request(replace=["r0"], idempotency_key="one")["operation_id"] == document["operation_id"]
        )
        with pytest.raises(ConflictError, match="another change"):
            client.operations.request(size=3)
        assert (await ended(client, document["operation_id"]))["phase"] == "done"
        assert members(client) == ["r1", "r2"]
        document = client.operations.request(remove=["r1"], drain_timeout_s=30.0)
        assert (await ended(client, document["operation_id"]))["phase"] == "done"
        assert members(client) == ["r2"]

    play(moe_model, expected, scene)


def test_a_cancelled_growth_leaves_no_trace(moe_model: Path, expected: list[list[int]]) -> None:
    async def scene(client: ZmqClient) -> None:
        before = client.status()
        operation_id = await stopped_at(client, "load", size=3)  # or it might be done before it is cancelled
        client.operations.cancel(operation_id)
        assert (await ended(client, operation_id))["phase"] == "rolled_back"
        with pytest.raises(ConflictError, match="cannot be cancelled"):
            client.operations.cancel(operation_id)
        await whole(client, 2)
        after = client.status()
        assert after["epoch"] == before["epoch"]
        assert [rank["pid"] for rank in after["ranks"]] == [rank["pid"] for rank in before["ranks"]]

    play(moe_model, expected, scene)


@pytest.mark.parametrize("victim", ["member", "newcomer"])
def test_a_death_during_growth_costs_no_token(moe_model: Path, expected: list[list[int]], victim: str) -> None:
    async def scene(client: ZmqClient) -> None:
        operation_id = await stopped_at(client, "load", size=3)
        place = 1 if victim == "member" else 2
        dead = client.status()["ranks"][place]
        os.kill(dead["pid"], signal.SIGKILL)
        await until(lambda: dead["rank_id"] not in {rank["rank_id"] for rank in client.status()["ranks"]})
        client.ranks.holds.release()
        assert (await ended(client, operation_id))["phase"] == "rolled_back"
        await whole(client, 2)

    play(moe_model, expected, scene)


def test_without_healing_the_survivors_go_on(moe_model: Path, expected: list[list[int]]) -> None:
    async def scene(client: ZmqClient) -> None:
        os.kill(client.status()["ranks"][0]["pid"], signal.SIGKILL)
        await until(lambda: members(client) == ["r1"] and not client.operations.is_busy)
        await asyncio.sleep(1.0)
        assert members(client) == ["r1"]
        placement = client.status()["placement"]
        assert sorted(each for each in placement["slots"]["r1"][0] if each >= 0) == list(
            range(placement["num_experts"])
        )

    play(moe_model, expected, scene, self_heal=False)


def test_what_cannot_be_done_is_refused(moe_model: Path, expected: list[list[int]]) -> None:
    async def scene(client: ZmqClient) -> None:
        operations = client.operations
        for asked, message in (
            ({"size": 0}, "data_parallel_size is 0"),
            ({"size": 100}, "data_parallel_size is 100"),
            ({"remove": ["r9"]}, "remove_ranks names r9"),
            ({"remove": ["r0", "r1"]}, "would leave 0 ranks"),
        ):
            with pytest.raises(InvalidRequestError, match=message):
                operations.request(**asked)  # type: ignore[arg-type]
        with pytest.raises(NotFoundError):
            operations.document("op-none")
        forecast = operations.request(size=1, dry_run=True)
        assert forecast["plan"]["bytes_to_read"] > 0
        assert len(members(client)) == 2

    play(moe_model, expected, scene)


def test_a_rank_that_dies_before_the_first_epoch_is_replaced_with_its_experts(
    moe_model: Path, expected: list[list[int]]
) -> None:
    async def main() -> None:
        async with running(moe_model, **SPREAD) as client:
            os.kill(client.status()["ranks"][0]["pid"], signal.SIGKILL)
            await whole(client, 2)
            assert members(client) == ["r1", "r2"]
            assert client.status()["epoch"] == 1
            assert await text_of(client.generate(generation(PROMPTS[0], GREEDY))) == expected[0]

    asyncio.run(main())
