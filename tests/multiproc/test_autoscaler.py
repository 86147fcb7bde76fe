"""The autoscaler's operations beside a user's, with experts spread over real ranks: the user's wins."""

from __future__ import annotations

from pathlib import Path

import pytest
from elastic_scenes import ended, members, play, undisturbed_texts
from ranks import until

from nobiru.engine.client import ZmqClient
from nobiru.errors import ConflictError


def test_a_users_change_takes_the_place_of_the_autoscalers(moe_model: Path) -> None:
    async def scene(client: ZmqClient) -> None:
        operations, holds = client.operations, client.ranks.holds
        assert not client.usage().is_changing
        holds.hold("prepare")
        ours = operations.request(size=3, origin="autoscaler")
        assert ours["origin"] == "autoscaler"
        await until(lambda: holds.num_waiting("prepare") == 3)
        assert client.usage().is_changing
        with pytest.raises(ConflictError, match="another change"):
            operations.request(size=4, origin="autoscaler")
        users = operations.request(size=1)
        assert (await ended(client, ours["operation_id"]))["phase"] == "rolled_back"
        assert "a user asked" in operations.document(ours["operation_id"])["error"]
        holds.release()
        assert (await ended(client, users["operation_id"]))["phase"] == "done"
        assert members(client) == ["r0"]
        assert client.status()["desired_size"] == 1

    play(moe_model, undisturbed_texts(moe_model), scene)


def test_a_users_change_stands_and_a_commit_too(moe_model: Path) -> None:
    async def scene(client: ZmqClient) -> None:
        operations, holds = client.operations, client.ranks.holds
        holds.hold("prepare")
        users = operations.request(size=1)
        with pytest.raises(ConflictError, match="another change"):
            operations.request(size=3, origin="autoscaler")
        holds.release()
        assert (await ended(client, users["operation_id"]))["phase"] == "done"
        holds.hold("apply")
        ours = operations.request(size=2, origin="autoscaler")
        await until(lambda: operations.document(ours["operation_id"])["phase"] == "settling")
        with pytest.raises(ConflictError, match="another change"):
            operations.request(size=1)
        holds.release()
        assert (await ended(client, ours["operation_id"]))["phase"] == "done"
        assert client.status()["desired_size"] == client.usage().size == 2

    play(moe_model, undisturbed_texts(moe_model), scene)
