"""What is sent, and when: prompts made up or read from a file, and the times at which requests are due.

Everything is decided before the run from a seed, so two runs with the same options send the same.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from nobiru.errors import ConfigError

# Everyday words that are one token each, with the blank before them, in the vocabularies of common models.
_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother area
money story fact month lot right study book eye job word business issue side kind head house service friend father
power hour game line end member law car city name team minute idea body back parent face level office door health
person art war history party result change morning reason research girl guy moment air teacher force
"""
WORDS = tuple(_WORDS.split())
TEXT_KEYS = ("prompt", "text", "input")
LENGTH_KEYS = ("output_len", "max_tokens")

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One request's content: a text, or the messages of a chat; `output_len` is its `max_tokens`."""

    content: str | list[Message]
    output_len: int

    def text(self) -> str:
        """The text, also of messages."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(str(message.get("content", "")) for message in self.content)

    def messages(self) -> list[Message]:
        return [{"role": "user", "content": self.content}] if isinstance(self.content, str) else self.content


def random_prompts(
    count: int, *, input_len: int, output_len: int, range_ratio: float = 0.0, prefix_len: int = 0, seed: int = 0
) -> list[Prompt]:
    """`count` texts of random words, with lengths drawn evenly from (1 - `range_ratio`) to (1 + `range_ratio`) × mean.

    All begin with the same `prefix_len` words. A word is about a token; what the server counted is in the report.
    """
    rng = random.Random(seed)

    def length(mean: int) -> int:
        return rng.randint(max(1, math.floor(mean * (1 - range_ratio))), max(1, math.ceil(mean * (1 + range_ratio))))

    prefix = rng.choices(WORDS, k=prefix_len)
    return [
        Prompt(content=" ".join(prefix + rng.choices(WORDS, k=length(input_len))), output_len=length(output_len))
        for _ in range(count)
    ]


def read_prompts(path: Path, count: int, *, output_len: int) -> list[Prompt]:
    """The first `count` prompts of a JSON lines file, over and over if it has fewer; raises `ConfigError`.

    A line is a text, or an object with `prompt`, `text`, `input` or `messages`, and maybe `output_len` or `max_tokens`.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"dataset_path: {path} cannot be read: {error}", param="dataset_path") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()][:count]
    if not numbered:
        raise ConfigError(f"dataset_path: {path} has no prompt", param="dataset_path")
    prompts = [_parse_line(line, f"{path}:{number}", output_len) for number, line in numbered]
    return list(islice(cycle(prompts), count))


def _parse_line(line: str, where: str, output_len: int) -> Prompt:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"dataset_path: {where} is not JSON: {error}", param="dataset_path") from error
    if isinstance(value, str):
        return Prompt(content=value, output_len=output_len)
    fields = value if isinstance(value, dict) else {}
    messages, texts = fields.get("messages"), [fields[key] for key in TEXT_KEYS if isinstance(fields.get(key), str)]
    lengths = [fields[key] for key in LENGTH_KEYS if key in fields] or [output_len]
    is_chat = isinstance(messages, list) and messages and all(isinstance(each, dict) for each in messages)
    if not is_chat and not texts:
        raise ConfigError(
            f"dataset_path: {where} must be a text or an object with {', '.join(TEXT_KEYS)} or messages",
            param="dataset_path",
        )
    if type(lengths[0]) is not int or lengths[0] < 1:
        raise ConfigError(f"dataset_path: {where}: {lengths[0]!r} is no number of tokens", param="dataset_path")
    content: Any = messages if is_chat else texts[0]
    return Prompt(content=content, output_len=lengths[0])


def due_times(count: int, request_rate: float, *, seed: int = 0) -> Sequence[float]:
    """Seconds at which requests are due: a Poisson process of `request_rate` a second; all at once if that is inf."""
    if math.isinf(request_rate):
        return [0.0] * count
    rng = random.Random(seed)
    times, now_s = [], 0.0
    for _ in range(count):
        times.append(now_s)
        now_s += rng.expovariate(request_rate)
    return times
