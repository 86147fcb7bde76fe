"""The description a rank process starts from. Light: the HTTP process writes it, the rank process reads it."""

from __future__ import annotations

import msgspec

from nobiru.config import EngineConfig
from nobiru.folder.state import FileState

STORE_IDENTITY = b"store"


class StoreSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One JSON line on the store's standard input: where to say that it is ready, and the address it is reached at.

    `is_restart` says that there was one before, which has died.
    """

    endpoint: str
    host: str = "127.0.0.1"
    is_restart: bool = False


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Of a rank among others: its `position` at the first start, the experts that all its workers together hold (None:
    those of the first start), for each MoE layer, and the address at which other ranks reach it."""

    position: int = 0
    slots: list[list[int]] | None = None
    host: str = "127.0.0.1"


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One JSON line. `recorder_fd` is an inherited descriptor; on another machine, `heart` is an address instead.

    A worker of the rank that gives no sign of life for `worker_timeout_s` is dead, and the rank with it. `files` are
    those of the model folder as they were when the server started.
    """

    rank_id: str
    place: Place
    endpoint: str
    recorder_fd: int | None = None
    heart: str | None = None
    engine: EngineConfig
    worker_timeout_s: float = 10.0
    log_level: str = "info"
    files: tuple[FileState, ...] = ()


def control_identity(rank_id: str) -> str:
    """Of the socket at which a rank can be reached in the middle of a step."""
    return f"{rank_id}/control"
