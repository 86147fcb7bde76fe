"""A server with a stand-in for the engine, in a process of its own.

The stand-ins take their orders from the texts, so that they can be used across processes:
`sleep:SECONDS` takes that long, `fail` is an input the model fails on, `bug` an exception nobody expects, `break` the
end of all ranks. A text has one token per byte and two special ones; the limit is 256 tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from nobiru.config import ServerConfig
from nobiru.elastic.autoscale import Usage
from nobiru.errors import InferenceError, InvalidRequestError
from nobiru.folder.spec import ModelFolder, NormalizeSpec, PoolingSpec
from nobiru.metrics import Metrics
from nobiru.request import EncodedPrompts, PoolingParams, PoolingRequest, Vectors
from nobiru.serving import start

DIM = 384
MAX_MODEL_LEN = 256
START_TIMEOUT_S = 60.0


def expected_vector(ids: list[int], dim: int = DIM) -> Vectors:
    """[D], of length one; another one for other ids."""
    weights = np.cos(np.arange(1, dim + 1, dtype=np.float64) * (1.0 + np.dot(ids, np.arange(1, len(ids) + 1)) % 997))
    return (weights / np.linalg.norm(weights)).astype(np.float32)


def ids_of(text: str) -> list[int]:
    return [1, *(3 + byte for byte in text.encode()), 2]


def text_of(ids: Any) -> str:
    return bytes(int(token) - 3 for token in ids if token >= 3).decode(errors="replace")


class FakeTokenizer:
    prefix, suffix = (1,), (2,)

    def encode(self, texts: list[str]) -> EncodedPrompts:
        [text] = texts
        ids = np.array(ids_of(text), dtype=np.int32)
        return EncodedPrompts(token_ids=ids, lengths=np.array([len(ids)], dtype=np.int32), truncated=np.zeros(1, bool))

    def tokens(self, ids: list[int]) -> list[str]:
        return [text_of([token]) or f"[{token}]" for token in ids]

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return text_of(ids)


class FakePool:
    frontend = SimpleNamespace(tokenizer=FakeTokenizer())

    async def prepare(self, prompts: Any, params: PoolingParams) -> EncodedPrompts:
        await asyncio.sleep(0)
        if isinstance(prompts, str) or isinstance(prompts[0], int):
            prompts = [prompts]
        rows = [ids_of(item) if isinstance(item, str) else item for item in prompts]
        limit = MAX_MODEL_LEN
        if params.truncate_prompt_tokens not in (None, -1):
            limit = min(limit, params.truncate_prompt_tokens)
        cut = [row[:limit] for row in rows]
        lengths, kept = [len(row) for row in rows], [len(row) for row in cut]
        if params.truncate_prompt_tokens is None and lengths != kept:
            raise InvalidRequestError(f"a text has {max(lengths)} tokens; the limit is {limit}", param="input")
        return EncodedPrompts(
            token_ids=np.concatenate([np.array(row, dtype=np.int32) for row in cut]),
            lengths=np.array(kept, dtype=np.int32),
            truncated=np.array(lengths) > np.array(kept),
        )

    def close(self) -> None:
        pass


class FakeEngine:
    """Counts what it is asked; `status` tells, since `/elastic/status` shows it to the tests."""

    def __init__(self, *, load_s: float = 0.0, tokens_per_s: float | None = 100.0, start_error: str = "") -> None:
        self._load_s = load_s
        self._start_error = start_error
        self.tokens_per_s = tokens_per_s
        self.queued_tokens = 0
        self.queued_requests = 0
        self.has_working_rank = False
        self.last_forward_s: float | None = None
        self.model_info: dict[str, Any] | None = None
        self.failed: asyncio.Future[str]
        self.counts = {"cancelled": 0, "probes": 0, "embedded": 0}

    def launch_now(self) -> None:
        pass

    async def start(self) -> None:
        if self._start_error:
            raise InvalidRequestError(self._start_error)
        self.failed = asyncio.get_running_loop().create_future()
        self._loaded = asyncio.Event()
        asyncio.get_running_loop().call_later(self._load_s, self._finish_loading)

    def _finish_loading(self) -> None:
        self.model_info = {"dtype": "float32", "device": "cpu", "num_threads": 1}
        self.has_working_rank = True
        self._loaded.set()

    async def stop(self) -> None:
        print("engine stopped", file=sys.stderr, flush=True)

    async def embed(self, request: PoolingRequest) -> Vectors:
        self.queued_tokens += request.prompts.num_tokens
        self.queued_requests += 1
        try:
            await self._loaded.wait()
            vectors = await self._compute(request)
            self.counts["embedded"] += 1
            self.last_forward_s = time.monotonic()
            return vectors
        except asyncio.CancelledError:
            self.counts["cancelled"] += 1
            raise
        finally:
            self.queued_tokens -= request.prompts.num_tokens
            self.queued_requests -= 1

    async def _compute(self, request: PoolingRequest) -> Vectors:
        rows = np.split(request.prompts.token_ids, np.cumsum(request.prompts.lengths)[:-1])
        order = text_of(rows[0])
        if order.startswith("sleep:"):
            await asyncio.sleep(float(order.removeprefix("sleep:")))
        if order == "fail":
            raise InferenceError("the model fails on this input")
        if order == "bug":
            raise RuntimeError("secret internals")
        if order == "break":
            self.failed.set_result("the rank died 5 times: out of memory")
            await asyncio.sleep(3600)
        return np.stack([expected_vector(row.tolist())[: request.dimensions] for row in rows])

    async def probe(self, timeout_s: float) -> bool:
        self.counts["probes"] += 1
        return self.has_working_rank

    def usage(self) -> Usage:
        size = int(self.has_working_rank)
        return Usage(size=size, is_changing=not size, num_served_tokens=0, compute_s=0.0, occupancy=0.0)

    def status(self) -> dict[str, Any]:
        return {"epoch": 0, "ranks": [{"rank_id": "r0", "pid": os.getpid(), "state": "serving"}], **self.counts}


def fake_folder() -> ModelFolder:
    return ModelFolder(
        path=Path("mini"),
        transformer_path=Path("mini"),
        config={},
        model_type="bert",
        modules=(PoolingSpec(), NormalizeSpec()),
        max_model_len=MAX_MODEL_LEN,
        hidden_size=DIM,
        embedding_dim=DIM,
        vocab_size=30_000,
    )


class ServerProcess:
    """The server as a child process; `options` are those of `ServerConfig`, `engine` those of `FakeEngine`.

    Modules named in `without` are as if they were not installed. `script` is the program to run, this file by default.
    """

    def __init__(
        self,
        *,
        engine: dict[str, Any] | None = None,
        policy: str = "priority",
        without: Sequence[str] = (),
        script: str = __file__,
        **options: Any,
    ) -> None:
        given = {"config": {"port": 0, **options}, "engine": engine or {}, "policy": policy, "without": without}
        arguments = json.dumps(given)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(
            [sys.executable, script, arguments],
            stderr=self._log,
            cwd=root,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")])},
        )
        self.port = 0

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_listening(self) -> None:
        found = self.wait_for_log(r"http://\S+:(\d+)")
        self.port = int(found[1])

    def wait_for_log(self, pattern: str, timeout_s: float = START_TIMEOUT_S) -> re.Match[str]:
        deadline_s = time.monotonic() + timeout_s
        while (found := re.search(pattern, self.log())) is None:
            assert time.monotonic() < deadline_s, f"no {pattern!r} in the log:\n{self.log()}"
            assert self.process.poll() is None, f"the server ended:\n{self.log()}"
            time.sleep(0.01)
        return found

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 30.0) -> int:
        return self.process.wait(timeout_s)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._log.close()


@contextlib.contextmanager
def running_server(**options: Any) -> Iterator[ServerProcess]:
    """A server that listens and has loaded its model (or, with `engine={"load_s": …}`, is still loading it)."""
    started = ServerProcess(**options)
    try:
        started.wait_listening()
        if not (options.get("engine") or {}).get("load_s"):
            started.wait_for_log("ready after")
        yield started
    finally:
        started.end()


def main() -> int:
    given = json.loads(sys.argv[1])
    sys.modules.update(dict.fromkeys(given["without"]))
    return start.run(
        msgspec.convert(given["config"], ServerConfig),
        folder=fake_folder(),
        client=FakeEngine(**given["engine"]),
        load_pool=FakePool,
        metrics=Metrics(),
        scheduling_policy=given["policy"],
    )


if __name__ == "__main__":
    sys.exit(main())
