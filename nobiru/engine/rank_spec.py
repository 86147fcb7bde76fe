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


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One JSON line. `recorder_fd` is an inherited descriptor; on another machine, `heart` is an address instead.

    `slots` says which expert of each MoE layer goes into which slot; None: as at the first start. `host` is the address
    at which other ranks reach this one. `files` are those of the model folder as they were when the server started.
    """

    rank_id: str
    position: int
    slots: list[list[int]] | None = None
    endpoint: str
    recorder_fd: int | None = None
    heart: str | None = None
    engine: EngineConfig
    log_level: str = "info"
    host: str = "127.0.0.1"
    files: tuple[FileState, ...] = ()


def control_identity(rank_id: str) -> str:
    """Of the socket at which a rank can be reached in the middle of a step."""
    return f"{rank_id}/control"
