"""A server for a small language model without weights: real tokenizer and chat template, a stand-in for the engine.

The stand-in takes its orders from the prompt, behind the last "@": `say TEXT` gives the tokens of TEXT and the end of
text, `slow SECONDS TEXT` does so with a pause before each token, `fail` and `bug` fail before the first token,
`failafter TEXT` and `bugafter TEXT` behind the last, `hang` never gives anything. Of several texts for a prompt, text c
ends in "#c". Without an end of text (`ignore_eos`), TEXT comes over and over.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import re
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
from server.http_fakes import FakeEngine, ServerProcess, running_server
from small_tokenizers import edit_json, small_tokenizer, write_folder
from tokenizers import Tokenizer, decoders

from nobiru.config import ServerConfig
from nobiru.errors import InferenceError
from nobiru.folder.read import read_folder
from nobiru.frontend.generation import GenerationFrontend
from nobiru.frontend.pool import TokenizerPool
from nobiru.generation import GenerationDelta, GenerationRequest, SampledToken
from nobiru.metrics import Metrics
from nobiru.serving import start

EOS = 2
LIMIT = 200
NUM_CACHED = 3
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}{{ mood or '' }}: {{ m.content }}"
    "{% if not (loop.last and m.role == 'assistant') %}</s>{% endif %}{% endfor %}"
    "{% if tools %}{{ tools | length }} tools{% endif %}{% if add_generation_prompt %}>{% endif %}"
    "{% if messages[0].role == 'martian' %}{{ raise_exception('no martians') }}{% endif %}"
)


@functools.cache
def tokenizer() -> Tokenizer:
    """Byte-level, without special tokens around texts."""
    made = small_tokenizer("byte_bpe")
    made.decoder = decoders.ByteLevel()
    made.post_processor = None
    return made


def ids_of(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


def text_of(ids: list[int]) -> str:
    return str(tokenizer().decode(ids, skip_special_tokens=False))


def language_model(path: Path) -> Path:
    """A folder of files that tokenizer and chat template are read from."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "vocab_size": tokenizer().get_vocab_size(),
        "eos_token_id": EOS,
    }
    write_folder(path, "byte_bpe", tokenizer=tokenizer(), config=config, limit=LIMIT)
    edit_json(path / "tokenizer_config.json", chat_template=TEMPLATE)
    edit_json(path / "generation_config.json", eos_token_id=EOS, temperature=0.5)
    (path / "modules.json").unlink()
    return path


class FakeStream:
    """What the engine's streams are to the server; `script` makes the deltas."""

    def __init__(self, engine: FakeGeneration, request: GenerationRequest) -> None:
        self._engine = engine
        self._deltas: deque[GenerationDelta] = deque()
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._open = set(range(request.params.n))
        self._is_closed = False
        self._task = asyncio.create_task(self._run(request))
        engine.counts["open"] += 1

    def __aiter__(self) -> AsyncIterator[GenerationDelta]:
        return self

    async def __anext__(self) -> GenerationDelta:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._deltas.popleft()

    def waiting(self) -> GenerationDelta | None:
        return self._deltas.popleft() if self._deltas else None

    def stop(self, child: int) -> None:
        self._engine.counts["stopped"] += 1
        self._open.discard(child)
        self._deltas = deque(delta for delta in self._deltas if delta.child != child)
        self._news.set()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._engine.counts["open"] -= 1
            self._engine.counts["aborted"] += bool(self._open)
            self._task.cancel()

    async def _run(self, request: GenerationRequest) -> None:
        try:
            async for delta in script(request):
                if delta.child in self._open:
                    self._deltas.append(delta)
                    if delta.finish_reason is not None:
                        self._open.discard(delta.child)
                    self._news.set()
        except Exception as error:
            self._error = error
            self._news.set()


class FakeGeneration(FakeEngine):
    """Also generates; `counts` tell of open, aborted and stopped streams, and what was asked last."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.counts |= {"open": 0, "aborted": 0, "stopped": 0}
        self.last: dict[str, Any] = {}

    def generate(self, request: GenerationRequest) -> FakeStream:
        self.last = {
            "prompt": text_of(request.prompt_token_ids.tolist()),
            "max_tokens": request.max_tokens,
            "stop_token_ids": list(request.stop_token_ids),
            "params": msgspec.to_builtins(request.params),
        }
        return FakeStream(self, request)

    def status(self) -> dict[str, Any]:
        return {**super().status(), "last": self.last}


async def script(request: GenerationRequest) -> AsyncIterator[GenerationDelta]:
    """The deltas that a prompt asks for."""
    found = re.findall(r"@(\w+) ?([^<>@]*)", text_of(request.prompt_token_ids.tolist()))
    order, rest = found[-1] if found else ("say", "hello")
    pause_s = 0.0
    if order == "slow":
        seconds, _, rest = rest.partition(" ")
        pause_s = float(seconds)
    if order == "fail":
        raise InferenceError("the model fails on this prompt")
    if order == "bug":
        raise RuntimeError("secret internals")
    if order == "hang":
        await asyncio.sleep(3600)
    params = request.params
    streams = [_tokens(request, rest if params.n == 1 else f"{rest}#{child}") for child in range(params.n)]
    for index in itertools.count():
        await asyncio.sleep(pause_s)
        running = False
        for child, stream in enumerate(streams):
            if (delta := _delta(request, child, index, stream)) is not None:
                running = True
                yield delta
        if not running:
            break
        if order in ("failafter", "bugafter") and index + 1 >= len(ids_of(rest)):
            await asyncio.sleep(0.05)
            raise InferenceError("the model fails behind this") if order == "failafter" else RuntimeError("secret")


def _tokens(request: GenerationRequest, text: str) -> Iterator[int]:
    while True:
        yield from ids_of(text)
        if EOS in request.stop_token_ids:
            yield EOS


def _delta(request: GenerationRequest, child: int, index: int, tokens: Iterator[int]) -> GenerationDelta | None:
    token = next(tokens, None)
    if token is None:
        return None
    stops = token in request.stop_token_ids and index >= request.params.min_tokens
    ends = stops or index + 1 == request.max_tokens
    if ends and hasattr(tokens, "close"):
        tokens.close()
    return GenerationDelta(
        child=child,
        first_index=index,
        tokens=[_sampled(request, token, index)],
        finish_reason="stop" if stops else "length" if ends else None,
        stop_token_id=token if stops else None,
        num_cached_tokens=NUM_CACHED,
    )


def _sampled(request: GenerationRequest, token: int, index: int) -> SampledToken:
    if (number := request.params.logprobs) is None:
        return SampledToken(token)
    logprob = -0.5 * (index + 1)
    return SampledToken(token, logprob, [(token + k, logprob - k) for k in range(number)])


@contextlib.contextmanager
def generation_server(**options: Any) -> Iterator[ServerProcess]:
    with running_server(script=__file__, **options) as started:
        yield started


def main() -> int:
    given = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as place:
        folder = read_folder(language_model(Path(place) / "tiny"))
        return start.run(
            msgspec.convert(given["config"], ServerConfig),
            folder=folder,
            client=FakeGeneration(**given["engine"]),
            load_pool=lambda: TokenizerPool(GenerationFrontend(folder)),
            metrics=Metrics(),
            scheduling_policy=given["policy"],
        )


if __name__ == "__main__":
    sys.exit(main())
