"""The description a rank process starts from. Light: the HTTP process writes it, the rank process reads it."""

from __future__ import annotations

import msgspec

from nobiru.config import EngineConfig


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One JSON line on the rank's standard input. `recorder_fd` is an inherited descriptor."""

    rank_id: str
    position: int
    endpoint: str
    recorder_fd: int
    engine: EngineConfig
    log_level: str = "info"
