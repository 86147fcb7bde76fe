"""Greedy texts of nobiru against those of `transformers.generate`, token for token, in every way of running them.

    python benchmarks/generate_parity.py MODEL_FOLDER [--prompts 64] [--tokens 128] [--modes alone,batched,…]

Both run in float32 on the CPU. The modes: `alone` (one sequence at a time), `batched` (all at once), `chunked` (a tiny
token budget, so prompts are computed piece by piece among tokens of others), `preempted` (a KV cache for few sequences,
so that some lose their blocks and are computed anew), `prefix` (everything a second time, from the prefix cache),
`ahead` (the next step planned while one runs).

A token that differs is excused only where the reference's logits of the two, on the same text, are within 1e-3. Behind
an excused one the reference goes on with nobiru's text. Log-probabilities of all chosen tokens are compared too. With
`--reference FILE` the texts of `transformers.generate`, which take longest, are kept there and read the next time. The
last line is JSON; the exit code is 0 if every mode agrees, 1 if one does not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from nobiru import LLM, RequestOutput, SamplingParams
from nobiru.kv.cache import CacheShape

EXCUSED_GAP = 1e-3
LOGPROB_TOLERANCE = 1e-4
MODES = ("alone", "batched", "chunked", "preempted", "prefix", "ahead")
BLOCK_SIZE = 16
# Sequences of the greatest length that the KV cache of the mode `preempted` has room for.
SCARCE_SEQUENCES = 3

_NAMES = ("Lily", "Tom", "Anna", "Ben", "The little bird", "A big dog", "The old man", "Grandma")
_PLACES = ("in the park", "by the sea", "at school", "under the tree", "in a small house", "on the hill", "", "at home")
_ENDINGS = (
    "One day,",
    "She said:",
    "Then they found a box and",
    "It was",
    "",
    "Everybody was happy because",
    "But",
    "He",
)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What `transformers` generates for each prompt."""

    prompts: list[list[int]]
    tokens: list[list[int]]


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How one mode compares: `num_excused` tokens were near-ties, `worst_gap` the largest gap among those that differ.

    `num_preemptions` and `num_cached_tokens` show that the mode did what it is there for.
    """

    mode: str
    num_tokens: int
    num_equal_texts: int
    num_excused: int
    worst_gap: float
    worst_logprob: float
    num_preemptions: int
    num_cached_tokens: int
    seconds: float
    ok: bool


def make_prompts(count: int) -> list[str]:
    """Beginnings of stories, of 5 to about 100 tokens, all different."""
    texts = []
    for number in range(count):
        name, place, ending = _NAMES[number % 8], _PLACES[number // 8 % 8], _ENDINGS[(number * 3 + number // 8) % 8]
        opening = f"Once upon a time, {name} was {place}." if number % 2 else f"{name} wanted to play {place}."
        middle = " The sun was warm and the sky was blue." * (number % 5)
        texts.append(f"{opening}{middle} {ending}".strip() + " " * (number >= 64) + "and " * (number // 64))
    return texts


def load_reference(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def reference_texts(model: Any, prompts: Sequence[list[int]], num_tokens: int) -> Reference:
    """`transformers.generate`, one prompt at a time, not ending before `num_tokens`."""
    tokens = []
    for prompt in track(prompts, "transformers.generate", console=Console(stderr=True), transient=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            whole = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=num_tokens,
                min_new_tokens=None,
                eos_token_id=None,
                pad_token_id=0,
                temperature=None,
                top_k=None,
                top_p=None,
                repetition_penalty=1.0,
            )
        tokens.append(whole[0, len(prompt) :].tolist())
    return Reference(prompts=list(prompts), tokens=tokens)


def kept_reference(file: Path | None, model: Any, prompts: Sequence[list[int]], num_tokens: int) -> Reference:
    """What the file has for these prompts, or else what is then written there."""
    if file is not None and file.exists():
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["prompts"] == list(prompts) and all(len(tokens) == num_tokens for tokens in kept["tokens"]):
            return Reference(**kept)
    reference = reference_texts(model, prompts, num_tokens)
    if file is not None:
        file.write_text(json.dumps(asdict(reference)), encoding="utf-8")
    return reference


@contextmanager
def engine(folder: Path, mode: str, max_model_len: int) -> Iterator[LLM]:
    options: dict[str, Any] = {}
    if mode == "alone":
        options["max_num_seqs"] = 1
    if mode == "chunked":
        options["max_num_batched_tokens"] = 13
    if mode == "ahead":
        options["async_scheduling"] = True
    if mode == "preempted":
        options["kv_cache_memory_bytes"] = _scarce_memory(folder, max_model_len)
    yield LLM(str(folder), dtype="float32", device="cpu", max_model_len=max_model_len, block_size=BLOCK_SIZE, **options)


def run_mode(folder: Path, mode: str, reference: Reference, model: Any) -> Agreement:
    """Generate in one way, and compare every token with the reference."""
    num_tokens = len(reference.tokens[0])
    longest = max(map(len, reference.prompts)) + num_tokens
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=0)
    with engine(folder, mode, longest) as llm:
        started_s = time.perf_counter()
        outputs = llm.generate(reference.prompts, params, use_tqdm=False)
        if mode == "prefix":
            outputs = llm.generate(reference.prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started_s
        scheduler = llm._core.scheduler
        num_free, num_preemptions = scheduler.kv_usage, scheduler.num_preemptions
    assert num_free == 0.0, "every KV block is free at the end"
    return compare(mode, outputs, reference, model, num_preemptions=num_preemptions, seconds=seconds)


def compare(
    mode: str,
    outputs: Sequence[RequestOutput],
    reference: Reference,
    model: Any,
    *,
    num_preemptions: int = 0,
    seconds: float = 0.0,
) -> Agreement:
    num_excused = num_equal = 0
    worst_gap = worst_logprob = 0.0
    is_complete = True
    for output, expected in zip(outputs, reference.tokens, strict=True):
        text = output.outputs[0]
        num_equal += text.token_ids == expected
        is_complete = is_complete and len(text.token_ids) == len(expected)
        logits_tV = _logits(model, output.prompt_token_ids, text.token_ids)
        chosen = torch.tensor(text.token_ids)
        gaps_t = logits_tV.amax(1) - logits_tV[torch.arange(len(chosen)), chosen]
        num_excused += int((gaps_t > 0).sum())
        worst_gap = max(worst_gap, float(gaps_t.max()))
        logprobs_t = logits_tV.log_softmax(1)[torch.arange(len(chosen)), chosen]
        ours_t = torch.tensor([token.logprob for token in text.logprobs or []])
        worst_logprob = max(worst_logprob, float((ours_t - logprobs_t).abs().max()))
    num_cached = sum(output.num_cached_tokens for output in outputs)
    did_its_thing = (mode != "preempted" or num_preemptions > 0) and (mode != "prefix" or num_cached > 0)
    return Agreement(
        mode=mode,
        num_tokens=sum(map(len, reference.tokens)),
        num_equal_texts=num_equal,
        num_excused=num_excused,
        worst_gap=worst_gap,
        worst_logprob=worst_logprob,
        num_preemptions=num_preemptions,
        num_cached_tokens=num_cached,
        seconds=seconds,
        ok=is_complete and did_its_thing and worst_gap <= EXCUSED_GAP and worst_logprob <= LOGPROB_TOLERANCE,
    )


def _logits(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """The reference's logits before each of `tokens`, [t, V]."""
    ids = torch.tensor([[*prompt, *tokens[:-1]]])
    with torch.inference_mode():
        logits: torch.Tensor = model(ids).logits[0, len(prompt) - 1 :]
    return logits.float()


def _scarce_memory(folder: Path, max_model_len: int) -> int:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    shape = CacheShape(
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        dtype=torch.float32,
        block_size=BLOCK_SIZE,
    )
    return shape.block_bytes * -(-max_model_len // BLOCK_SIZE) * SCARCE_SEQUENCES


def _table(agreements: Sequence[Agreement]) -> Table:
    table = Table(title="greedy texts against transformers.generate, float32")
    for name in (
        "mode",
        "tokens",
        "equal texts",
        "near-ties",
        "worst gap",
        "worst log-prob",
        "preempted",
        "cached",
        "s",
    ):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for each in agreements:
        table.add_row(
            each.mode if each.ok else f"[red]{each.mode}",
            str(each.num_tokens),
            str(each.num_equal_texts),
            str(each.num_excused),
            f"{each.worst_gap:.1e}",
            f"{each.worst_logprob:.1e}",
            str(each.num_preemptions),
            str(each.num_cached_tokens),
            f"{each.seconds:.1f}",
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--reference", type=Path, help="keep the texts of transformers.generate in this file")
    options = parser.parse_args()
    model = load_reference(options.model)
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    prompts = [tokenizer(text)["input_ids"] for text in make_prompts(options.prompts)]
    reference = kept_reference(options.reference, model, prompts, options.tokens)
    agreements = []
    for mode in options.modes.split(","):
        agreements.append(run_mode(options.model, mode, reference, model))
        print(agreements[-1], file=sys.stderr, flush=True)
    Console().print(_table(agreements))
    ok = all(each.ok for each in agreements)
    print(json.dumps({"model": options.model.name, "ok": ok, "modes": [asdict(each) for each in agreements]}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
