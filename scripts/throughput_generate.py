"""A small table of throughput: tokens/s of `LLM.generate` with one, 32 and 256 streams, and of prefill alone.

Without --model it makes Llamas with random weights, of SmolLM2-135M's and of Llama 3.2 1B's size: the speed of a model
does not depend on what it has learned, and nothing needs to be fetched. Prompts are token ids, never the same twice, so
no prefix cache serves them. scripts/gpu_check runs it.

    python scripts/throughput_generate.py --device cuda --seconds 3
    python scripts/throughput_generate.py --device cpu --shapes tiny --seconds 0.5
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from nobiru import LLM, SamplingParams


def llama(
    *, vocab: int, hidden: int, intermediate: int, layers: int, heads: tuple[int, int], context: int
) -> LlamaConfig:
    """`heads` of queries, and of keys and values."""
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        max_position_embeddings=context,
        tie_word_embeddings=True,
    )


SHAPES = {
    "tiny": llama(vocab=1000, hidden=64, intermediate=128, layers=2, heads=(4, 2), context=1024),
    "135m": llama(vocab=49152, hidden=576, intermediate=1536, layers=30, heads=(9, 3), context=2048),
    "1b": llama(vocab=128256, hidden=2048, intermediate=8192, layers=16, heads=(32, 8), context=4096),
}

# Room for 256 streams of 192 tokens, whatever the machine has.
KV_CACHE_BYTES = {"cuda": 4 << 30, "cpu": 2 << 30}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One row: so many prompts at once. Its rate counts output tokens, or those of the prompts in `prefill`."""

    name: str
    streams: int
    prompt_tokens: int
    output_tokens: int
    prefill: bool = False


POINTS = (
    Point(name="1 stream", streams=1, prompt_tokens=64, output_tokens=128),
    Point(name="32 streams", streams=32, prompt_tokens=64, output_tokens=128),
    Point(name="256 streams", streams=256, prompt_tokens=64, output_tokens=128),
    Point(name="prefill, 32 of 512", streams=32, prompt_tokens=512, output_tokens=1, prefill=True),
)


def make_model(folder: Path, shape: str, device: str) -> Path:
    """A Llama as `save_pretrained` writes it, with random weights in bfloat16, and a tokenizer of a few words."""
    torch.manual_seed(0)
    with torch.device(device):
        LlamaForCausalLM(SHAPES[shape]).bfloat16().save_pretrained(folder)
    release_memory()
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "<s>": 1, "</s>": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


def release_memory() -> None:
    """Give the device's memory back, so that the next model finds all of it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Prompts:
    """Random token ids below the vocabulary's end; no two prompts are the same."""

    def __init__(self, vocab_size: int) -> None:
        self._rng, self._vocab_size = np.random.default_rng(0), vocab_size

    def take(self, point: Point) -> list[list[int]]:
        ids = self._rng.integers(3, self._vocab_size, size=(point.streams, point.prompt_tokens))
        return [list(map(int, row)) for row in ids]


def measure(llm: LLM, prompts: Prompts, point: Point, seconds: float) -> list[float]:
    """Tokens per second of several calls, for at least `seconds` together, after one that does not count."""
    params = SamplingParams(temperature=0.0, max_tokens=point.output_tokens, ignore_eos=True)
    rates: list[float] = []
    end_s = float("inf")
    while time.perf_counter() < end_s or len(rates) < 2:
        batch = prompts.take(point)
        started_s = time.perf_counter()
        outputs = llm.generate(batch, params, use_tqdm=False)
        took_s = time.perf_counter() - started_s
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        if num_tokens != point.streams * point.output_tokens:
            sys.exit(
                f"{point.name}: {num_tokens} tokens came out, {point.streams * point.output_tokens} were asked for"
            )
        if end_s == float("inf"):
            end_s = time.perf_counter() + seconds
            continue
        rates.append((point.streams * point.prompt_tokens if point.prefill else num_tokens) / took_s)
    return rates


@contextmanager
def model_folder(given: str | None, shape: str, device: str) -> Iterator[str]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        yield str(make_model(Path(folder), shape, device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder (default: --shapes with random weights)")
    parser.add_argument("--shapes", help="of tiny, 135m, 1b, by commas (default: 135m,1b on CUDA, else tiny)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=3, help="for each row of the table")
    args = parser.parse_args()
    shapes = (args.shapes or ("135m,1b" if args.device == "cuda" else "tiny")).split(",")
    if unknown := [shape for shape in shapes if shape not in SHAPES]:
        parser.error(f"unknown shape {unknown[0]!r}; choose from {', '.join(SHAPES)}")
    names = [Path(args.model).name] if args.model else shapes
    table = Table("model", "point", "tokens/s", "range", title=f"LLM.generate, {args.dtype}, device {args.device}")
    for name in names:
        with model_folder(args.model, name, args.device) as folder:
            vocab_size = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
            started_s = time.perf_counter()
            cache_bytes = KV_CACHE_BYTES[args.device]
            llm = LLM(folder, dtype=args.dtype, device=args.device, max_num_seqs=256, kv_cache_memory_bytes=cache_bytes)
            print(f"{name}: loaded in {time.perf_counter() - started_s:.1f} s", flush=True)
            prompts = Prompts(vocab_size)
            for point in POINTS:
                rates = measure(llm, prompts, point, args.seconds)
                median, span = statistics.median(rates), f"{min(rates):,.0f} to {max(rates):,.0f}"
                print(f"{name}, {point.name}: {median:,.0f} tokens/s", flush=True)  # if the time limit comes first
                table.add_row(name, point.name, f"{median:,.0f}", span)
            del llm
            release_memory()
    Console(width=None if sys.stdout.isatty() else 100).print(table)


if __name__ == "__main__":
    main()
