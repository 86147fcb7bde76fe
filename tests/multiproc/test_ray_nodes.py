"""Nodes join a Ray cluster and disappear while texts are written: ranks follow, and no token is lost or different."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from elastic_scenes import SPREAD, ended, members, under_load, undisturbed_texts, whole
from ranks import is_alive, running, until
from ray_nodes import Nodes, occupied_nodes, ray_nodes

from nobiru.engine.client import ZmqClient
from nobiru.errors import InvalidRequestError

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with ray_nodes(2) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from small_models import make

    return make("qwen3-moe", tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def expected(moe_model: Path) -> list[list[int]]:
    return undisturbed_texts(moe_model)


async def places(client: ZmqClient, number: int) -> None:
    """Until the server has heard that there is room for so many ranks."""
    await until(lambda: client.status()["max_data_parallel_size"] == number)


def test_ranks_follow_the_nodes(nodes: Nodes, moe_model: Path, expected: list[list[int]]) -> None:
    seen: set[int] = set()

    def look(client: ZmqClient) -> None:
        seen.update(rank["pid"] for rank in client.status()["ranks"] if rank["pid"] is not None)

    async def grow_onto_a_new_node(client: ZmqClient) -> None:
        with pytest.raises(InvalidRequestError, match="data_parallel_size is 3; it must be from 1 to 2"):
            client.operations.request(size=3)
        newcomer = nodes.add(wait=False)
        assert newcomer not in occupied_nodes()
        await places(client, 3)
        operation = client.operations.request(size=3)
        assert (await ended(client, operation["operation_id"]))["phase"] == "done"
        look(client)
        assert occupied_nodes() == sorted(nodes.ids)

    async def give_back_a_place(client: ZmqClient) -> None:
        operation = client.operations.request(size=2)
        assert (await ended(client, operation["operation_id"]))["phase"] == "done"
        await until(lambda: len(occupied_nodes()) == 2, 30)

    async def lose_a_node_and_move_to_another(client: ZmqClient) -> None:
        nodes.kill(occupied_nodes()[0])
        await until(lambda: len(members(client)) == 1)
        await whole(client, 2)
        look(client)
        assert occupied_nodes() == sorted(nodes.ids)

    async def lose_a_node_without_another(client: ZmqClient) -> None:
        nodes.kill(nodes.ids[0])
        await places(client, 1)
        await until(lambda: len(members(client)) == 1)
        await whole(client, 1)
        await asyncio.sleep(3)
        assert not client.operations.is_busy, "healing waits for room, and does not keep others from asking"
        nodes.add(wait=False)  # Ray starts nodes from the main thread only
        await whole(client, 2)
        look(client)

    async def main() -> None:
        on_ray = {"data_parallel_backend": "ray", "ray_address": nodes.address}
        async with running(moe_model, faults="step_delay_ms=20", **on_ray, **SPREAD) as client:
            await whole(client, 2)
            look(client)
            async with under_load(client, expected):
                await grow_onto_a_new_node(client)
                await give_back_a_place(client)
                await lose_a_node_and_move_to_another(client)
                await lose_a_node_without_another(client)
            assert client.queued_requests == 0

    asyncio.run(main())
    assert len(seen) == 5
    assert not any(map(is_alive, seen))
    nodes.assert_nothing_is_left()
