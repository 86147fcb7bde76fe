"""The flight recorder is readable by its creator after the writer is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from nobiru.engine.recorder import FlightRecorder

WRITER = """
import os, signal, sys
from nobiru.engine.recorder import FlightRecorder
recorder = FlightRecorder.attach(int(sys.argv[1]))
recorder.beat()
recorder.step_begins([5, 7, 11])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_executing_survives_a_kill() -> None:
    recorder = FlightRecorder.create(4)
    assert recorder.seq_ids == []
    assert recorder.heartbeat_s == 0
    before_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", WRITER, str(recorder.fd)], pass_fds=[recorder.fd], check=False)
    assert done.returncode == -signal.SIGKILL
    assert recorder.seq_ids == [5, 7, 11]
    assert before_s <= recorder.heartbeat_s <= time.monotonic()
    recorder.close()


def test_nothing_executes_between_steps_and_nothing_is_left_open() -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    recorder = FlightRecorder.create(2)
    recorder.step_begins([1, 2])
    recorder.step_ends()
    assert recorder.seq_ids == []
    recorder.close()
    assert len(os.listdir("/proc/self/fd")) == num_open
