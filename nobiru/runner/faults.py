"""Faults on purpose, for tests of what happens after them.

Off unless `NOBIRU_FAULT_INJECTION` is set, as in `kill_on_token=1234,raise_on_token=99`:

* `kill_on_token=ID`: the process dies of SIGKILL when a batch holds this token id.
* `raise_on_token=ID`: a batch that holds this token id raises.
* `memory_tokens=N`: a batch of more than N tokens is out of memory.
* `nan_on_token=ID`: the vector of a sequence that holds this token id is not a number.
* `step_delay_ms=N`: every batch takes N milliseconds longer.
* `fail_at_start=N`: the first N processes of a server die while they load (counted by rank id).
* `fail_from_rank=N`: processes of ranks with ids from N on do.
* `restarted_store_port=N`: a rendezvous store that takes the place of one that died listens on this port.
* `hold_load_ms=N`, `hold_prepare_ms`, `hold_drain_ms`, `hold_park_ms`, `hold_apply_ms`: what ends this phase of a
  change of the ranks is reported N milliseconds late (`nobiru.elastic.holds`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence

import numpy as np

from nobiru.errors import ConfigError
from nobiru.runner.executor import Outcome, Runner
from nobiru.runner.inputs import Input

FAULTS = (
    "kill_on_token",
    "raise_on_token",
    "memory_tokens",
    "nan_on_token",
    "step_delay_ms",
    "fail_at_start",
    "fail_from_rank",
    "restarted_store_port",
    "hold_load_ms",
    "hold_prepare_ms",
    "hold_drain_ms",
    "hold_park_ms",
    "hold_apply_ms",
)


def parse_faults(text: str) -> dict[str, int]:
    """`name=integer` pairs; `ConfigError` names what is unknown."""
    faults = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in FAULTS or not value.isdigit():
            known = ", ".join(FAULTS)
            raise ConfigError(f"fault {part!r} is not one of {known} with =INTEGER", param="fault_injection")
        faults[name] = int(value)
    return faults


class FaultyRunner:
    """A runner with faults in front of it."""

    def __init__(self, runner: Runner, faults: Mapping[str, int]) -> None:
        self._runner = runner
        self._faults = faults

    def run(self, sequences: Sequence[Input]) -> list[Outcome]:
        time.sleep(self._faults.get("step_delay_ms", 0) / 1000)
        if self._holds("kill_on_token", sequences):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._holds("raise_on_token", sequences):
            raise RuntimeError("fault injection: a token that raises")
        num_tokens = sum(each.token_ids.size for each in sequences)
        if num_tokens > self._faults.get("memory_tokens", num_tokens):
            raise MemoryError(f"fault injection: {num_tokens} tokens are too many")
        results = self._runner.run(sequences)
        return [
            np.full_like(result, np.nan)
            if isinstance(result, np.ndarray) and self._holds("nan_on_token", [each])
            else result
            for result, each in zip(results, sequences, strict=True)
        ]

    def _holds(self, fault: str, sequences: Sequence[Input]) -> bool:
        token_id = self._faults.get(fault)
        return token_id is not None and any((each.token_ids == token_id).any() for each in sequences)
