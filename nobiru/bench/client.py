"""One request to a server with OpenAI's interface, and what came when.

Owns the three endpoints' bodies and answers. A failure of any kind becomes `RequestRecord.error`, one line that groups
well; it never ends the run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from nobiru.bench.sse import EventDecoder
from nobiru.bench.statistics import RequestRecord
from nobiru.bench.workload import Prompt
from nobiru.errors import ConfigError, UnavailableError

Endpoint = Literal["completions", "chat", "embeddings"]
PATHS: dict[str, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "embeddings": "/v1/embeddings",
}
CHECK_TIMEOUT_S = 10.0
MAX_ERROR_CHARS = 200
_TEXT_FIELDS = ("text", "content", "reasoning", "reasoning_content", "refusal", "tool_calls", "token_ids")

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Whom to ask and how. `url` has no `/v1`; `extra_body` goes into every request."""

    url: str
    endpoint: Endpoint
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)
    ignore_eos: bool = False
    temperature: float = 0.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """The JSON body of one request."""
        if self.endpoint == "embeddings":
            return {"model": self.model, "input": prompt.text(), **self.extra_body}
        content = {"messages": prompt.messages()} if self.endpoint == "chat" else {"prompt": prompt.text()}
        return {
            "model": self.model,
            **content,
            "max_tokens": prompt.output_len,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}),
            **self.extra_body,
        }


class Client:
    """Connections to one server. `clock` gives seconds since the run began; `timeout_s` is for one whole request."""

    def __init__(self, target: Target, *, clock: Clock, timeout_s: float) -> None:
        self._target, self._clock = target, clock
        self._url = target.url + PATHS[target.endpoint]
        # Every request in flight has a connection of its own; a pool limit would be a second, hidden queue.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            headers=dict(target.headers),
        )
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._session.close()

    async def send(self, prompt: Prompt, record: RequestRecord) -> None:
        """Send one request and enter into `record` what happened."""
        try:
            async with self._session.post(self._url, json=self._target.body(prompt)) as response:
                if response.status != 200:
                    record.error = f"status {response.status}: {_message(await response.text())}"
                elif self._target.endpoint == "embeddings":
                    self._read_embedding(json.loads(await response.read()), record)
                elif "text/event-stream" not in response.content_type:
                    record.error = f"the answer is {response.content_type}, not text/event-stream"
                else:
                    await self._read_stream(response, record)
        except TimeoutError:
            record.error = f"no whole answer within {self._timeout_s:g} s"
        except (aiohttp.ClientError, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            record.error = _one_line(f"{type(error).__name__}: {error}")
        record.end_s = self._clock()

    def _read_embedding(self, answer: Any, record: RequestRecord) -> None:
        if not answer["data"][0]["embedding"]:
            record.error = "the answer has no vector"
        record.prompt_tokens = int(answer.get("usage", {}).get("prompt_tokens", 0))

    async def _read_stream(self, response: aiohttp.ClientResponse, record: RequestRecord) -> None:
        decoder, usage, ended = EventDecoder(), None, False
        async for chunk in response.content.iter_any():
            now_s = self._clock()
            for data in decoder.feed(chunk):
                if data == "[DONE]":
                    ended = True
                    continue
                event = json.loads(data)
                if event.get("error"):
                    record.error = f"error in the stream: {_message(data)}"
                    return
                usage = event.get("usage") or usage
                if any(_has_tokens(choice) for choice in event.get("choices") or ()):
                    record.arrivals_s.append(now_s)
        if not ended:
            record.error = "the stream ended without [DONE]"
        usage = usage or {}
        record.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        record.output_tokens = int(usage.get("completion_tokens") or len(record.arrivals_s))


def _has_tokens(choice: Mapping[str, Any]) -> bool:
    """Whether a piece of the stream carries text or tokens; a chat's first may only say who speaks."""
    parts = (choice, choice.get("delta") or {})
    return any(part.get(name) for part in parts for name in _TEXT_FIELDS)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_ERROR_CHARS else line[: MAX_ERROR_CHARS - 1] + "…"


def _message(body: str) -> str:
    """What an error's body says."""
    try:
        error = json.loads(body)
        error = error.get("error", error)
        message = error.get("message", error) if isinstance(error, dict) else error
    except (json.JSONDecodeError, AttributeError):
        message = body
    return _one_line(str(message))


async def find_model(url: str, wanted: str | None, headers: Mapping[str, str]) -> str:
    """The model to ask for: `wanted`, or the first that the server lists.

    Raises `UnavailableError` when no server answers, `ConfigError` when it has no such model.
    """
    timeout = aiohttp.ClientTimeout(total=CHECK_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=dict(headers)) as session,
            session.get(f"{url}/v1/models") as response,
        ):
            status, body = response.status, await response.text()
    except (aiohttp.ClientError, OSError, ValueError) as error:
        reason = f"no answer within {CHECK_TIMEOUT_S:g} s" if isinstance(error, TimeoutError) else _reason(error)
        raise UnavailableError(
            f"no server answers at {url}: {reason}. Start one (nobiru serve MODEL), or name another with --url"
        ) from error
    if status in (401, 403):
        raise ConfigError(f"the server at {url} wants a key: --api-key KEY or NOBIRU_API_KEY", param="api_key")
    names = _model_names(body) if status == 200 else []
    if wanted is None:
        if not names:
            raise ConfigError(f"{url}/v1/models names no model (status {status}); say --model NAME", param="model")
        return names[0]
    if names and wanted not in names:
        raise ConfigError(f"the server at {url} has no model {wanted!r}, only {', '.join(names)}", param="model")
    return wanted


def _reason(error: Exception) -> str:
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    number = cause.errno if isinstance(cause, OSError) else None
    return os.strerror(number) if number and number > 0 else _one_line(str(error) or type(error).__name__)


def _model_names(body: str) -> list[str]:
    try:
        return [str(model["id"]) for model in json.loads(body)["data"]]
    except (ValueError, LookupError, TypeError):
        return []
