"""How the server's log looks: text or JSON lines on standard error.

Owns handlers and formats of the `nobiru` loggers. A record's `fields` (a dict in `extra`) become keys of a JSON line.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Literal

import msgspec

from nobiru.errors import ConfigError

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, the record's fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def configure_logging(*, log_format: Literal["text", "json"], level: str) -> None:
    """Set up the `nobiru` loggers, and silence uvicorn's: what it would say is said by our own."""
    if level.lower() not in LEVELS:
        raise ConfigError(f"log_level is {level!r}; choose from {', '.join(LEVELS)}", param="log_level")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(TEXT_FORMAT))
    logger = logging.getLogger("nobiru")
    logger.handlers = [handler]
    logger.setLevel(LEVELS[level.lower()])
    logger.propagate = False
    # The access log has a switch of its own.
    logging.getLogger("nobiru.access").setLevel(logging.INFO)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
