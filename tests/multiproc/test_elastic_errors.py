"""What the machine and the folder may refuse while ranks change: the operation says so, and nobody else notices."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from elastic_scenes import ended, members, play, undisturbed_texts, whole
from generation_requests import PROMPTS, texts_of
from ranks import descendants, is_alive, name_of, until

from nobiru import machine
from nobiru.engine import controller as controller_module
from nobiru.engine import operations as operations_module
from nobiru.engine.client import ZmqClient
from nobiru.errors import ConflictError

READ_BYTES_PER_S = 10_000


@pytest.fixture(scope="module")
def expected(moe_model: Path) -> list[list[int]]:
    return undisturbed_texts(moe_model)


@pytest.fixture
def own_model(moe_model: Path, tmp_path: Path) -> Path:
    """A copy, for tests that damage it."""
    return shutil.copytree(moe_model, tmp_path / "model")


@contextmanager
def limited(kind: int, soft: int) -> Iterator[None]:
    """This process, and those it starts, have a smaller limit."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@contextmanager
def logging_to(path: str) -> Iterator[None]:
    """Processes that are started write their logs there."""
    target, before = os.open(path, os.O_WRONLY), os.dup(2)
    os.dup2(target, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(target)


async def is_undone(client: ZmqClient, operation_id: str, error: str) -> None:
    """With this error, and the two ranks of before serve."""
    document = await ended(client, operation_id)
    assert document["phase"] == "rolled_back"
    assert error in document["error"]
    await until(lambda: len(client.status()["ranks"]) == 2)
    assert (members(client), client.status()["epoch"]) == (["r0", "r1"], 1)
    await texts_of(client, PROMPTS[:2])


def test_without_descriptors_or_memory_no_rank_is_added(moe_model: Path, expected: list[list[int]]) -> None:
    async def scene(client: ZmqClient) -> None:
        num_descriptors = len(os.listdir("/proc/self/fd"))
        with limited(resource.RLIMIT_NOFILE, 3), pytest.raises(ConflictError, match="Too many open files"):
            client.operations.request(size=3)
        with limited(resource.RLIMIT_FSIZE, 0):  # as a full memory file system, which no test can make
            operation_id = client.operations.request(size=3)["operation_id"]
        await is_undone(
            client, operation_id, "the new rank r2 died: it could not be started: [Errno 27] File too large"
        )
        await until(lambda: len(os.listdir("/proc/self/fd")) <= num_descriptors)
        with logging_to("/dev/full"):  # a disk without room for logs costs the logs only
            operation_id = client.operations.request(size=3)["operation_id"]
        assert (await ended(client, operation_id))["phase"] == "done"
        pids = [rank["pid"] for rank in client.status()["ranks"]]
        operation_id = client.operations.request(size=2)["operation_id"]
        assert (await ended(client, operation_id))["phase"] == "done"
        await until(lambda: not is_alive(pids[2]))

    play(moe_model, expected, scene)


def test_a_port_that_is_taken_undoes_the_operation(moe_model: Path, expected: list[list[int]]) -> None:
    async def scene(client: ZmqClient) -> None:
        (store,) = [pid for pid in descendants(os.getpid()) if name_of(pid) == "nobiru-store"]
        os.kill(store, signal.SIGKILL)
        await until(lambda: not is_alive(store))
        await asyncio.sleep(0.5)  # the server hears of it
        operation_id = client.operations.request(size=1)["operation_id"]
        await is_undone(client, operation_id, "the rendezvous store cannot be opened")
        assert str(port) in client.operations.document(operation_id)["error"]
        listener.close()
        phases: list[str] = []
        while "done" not in phases and len(phases) < 5:  # the last start that failed may be reported late
            operation_id = client.operations.request(size=1)["operation_id"]
            phases.append((await ended(client, operation_id))["phase"])
        assert phases[-1] == "done", "the port is free again"

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        faults = f"step_delay_ms=5,restarted_store_port={port}"
        play(moe_model, expected, scene, faults=faults, starts_warm=False)


def test_a_folder_that_has_changed_gives_no_new_ranks(own_model: Path, expected: list[list[int]]) -> None:
    weights = own_model / "model.safetensors"

    async def scene(client: ZmqClient) -> None:
        operations = client.operations
        operation_id = operations.request(size=3)["operation_id"]
        weights.rename(own_model / "elsewhere")
        await is_undone(client, operation_id, "model.safetensors is gone")
        with pytest.raises(ConflictError, match=r"changed since the server started: model\.safetensors is gone"):
            operations.request(size=3)
        assert "is gone" in operations.request(size=3, dry_run=True)["error"]
        assert operations.request(size=1, dry_run=True)["error"] is None, "who stays has the file open"
        (own_model / "elsewhere").rename(weights)
        plan = operations.request(size=1, dry_run=True)["plan"]
        operation_id = operations.request(size=1)["operation_id"]
        await asyncio.sleep(0.3)
        os.utime(weights)
        await is_undone(client, operation_id, "was changed since it was opened")
        preparing_s = operations.document(operation_id)["seconds"]["preparing"]
        assert preparing_s < 0.9 * plan["bytes_to_read"] / READ_BYTES_PER_S, "it stops where it is noticed"

    play(own_model, expected, scene, max_transfer_bytes_per_s=READ_BYTES_PER_S)


def test_reading_keeps_its_limit_while_others_serve(moe_model: Path, expected: list[list[int]]) -> None:
    limit = 60_000

    async def scene(client: ZmqClient) -> None:
        plan = client.operations.request(size=1, dry_run=True)["plan"]
        assert plan["bytes_to_read"] == plan["ranks"]["r0"]["bytes_to_read"] > limit / 2
        document = await ended(client, client.operations.request(size=1)["operation_id"])
        assert document["phase"] == "done"
        assert document["bytes_moved"] == plan["bytes_to_read"]
        assert document["seconds"]["preparing"] >= plan["bytes_to_read"] / limit

    play(moe_model, expected, scene, max_transfer_bytes_per_s=limit)


def test_ranks_that_keep_crashing_leave_the_others_alone(
    moe_model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (operations_module, controller_module):
        monkeypatch.setattr(module, "backoff_s", lambda num_failures: 0.1)

    async def scene(client: ZmqClient) -> None:
        operations = client.operations
        operation_id = operations.request(size=3)["operation_id"]
        await is_undone(client, operation_id, "the new rank r2 died: exited with code 1: RuntimeError: fault injection")
        os.kill(client.status()["ranks"][1]["pid"], signal.SIGKILL)

        def tries() -> list[dict[str, Any]]:
            return [each for each in operations.documents() if each["origin"] == "heal"]

        await until(lambda: len(tries()) == operations_module.MAX_HEAL_FAILURES and not operations.is_busy)
        await asyncio.sleep(0.5)
        assert len(tries()) == operations_module.MAX_HEAL_FAILURES, "it has stopped"
        assert all(each["phase"] == "rolled_back" and "fault injection" in each["error"] for each in tries())
        await whole(client, 1)
        assert members(client) == ["r0"]
        await texts_of(client, PROMPTS[:2])

    play(moe_model, expected, scene, faults="step_delay_ms=5,fail_from_rank=2")


def test_what_does_not_fit_is_refused_before_anything_starts(
    moe_model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(client: ZmqClient) -> None:
        operations = client.operations
        plan = operations.request(size=4, dry_run=True)["plan"]
        assert plan["members"] == ["r0", "r1", "new-0", "new-1"]
        new = plan["ranks"]["new-0"]
        assert (new["role"], new["memory_bytes"]["before"], new["node"]) == ("joins", 0, "127.0.0.1")
        assert new["memory_bytes"]["after"] > 50 * 2**20, "an interpreter and torch at least"
        needed = plan["nodes"]["127.0.0.1"]["needed_bytes"]
        assert needed >= 2 * new["memory_bytes"]["after"] * 0.99
        monkeypatch.setattr(machine, "free_memory_bytes", lambda: needed // 2)
        document = operations.request(size=4, dry_run=True)
        assert "not enough memory on 127.0.0.1" in document["error"]
        with pytest.raises(ConflictError, match=r"are needed for 2 new ranks, and .* are available") as refused:
            operations.request(size=4)
        assert (refused.value.status, refused.value.code) == (409, "insufficient_memory")
        assert len(operations.documents()) == 1, "only the start"
        assert len(client.status()["ranks"]) == 2
        assert operations.request(size=1, dry_run=True)["error"] is None
        document = await ended(client, operations.request(size=1)["operation_id"])
        assert document["phase"] == "done"
        assert document["plan"]["members"] == ["r0"]
        pause = operations.request(size=1, dry_run=True)["plan"]
        assert (pause["num_pauses_measured"], pause["expected_pause_seconds"]) == (1, document["pause_seconds"])

    play(moe_model, expected, scene)
