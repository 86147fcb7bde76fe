"""What forked processes do in tests: they answer on a pipe whose number is in their description."""

from __future__ import annotations

import json
import os
import sys
import threading
import time

IMPORTED_BY = os.getpid()


def answer() -> None:
    """What the process is, then whatever `then` says."""
    spec = json.loads(sys.stdin.buffer.readline())
    facts = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "imported_by": IMPORTED_BY,
        "size": len(spec.get("filler", "")),
        "variable": os.environ.get("NOBIRU_TEST"),
        "threads": len(os.listdir("/proc/self/task")),
        "python_threads": threading.active_count(),
        "descriptors": open_descriptors(),
    }
    os.write(spec["answers"], json.dumps(facts).encode() + b"\n")
    match spec.get("then"):
        case "wait":
            while os.read(0, 4096):
                continue
            os._exit(4)
        case "stand still":
            time.sleep(600)
        case "raise":
            raise RuntimeError("as it was told")


def open_descriptors() -> list[int]:
    listed = sorted(map(int, os.listdir("/proc/self/fd")))
    return [number for number in listed if os.path.exists(f"/proc/self/fd/{number}")]


if os.environ.get("NOBIRU_TEST") == "no import":
    raise ImportError("as it was told")
