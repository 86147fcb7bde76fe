"""A small table of throughput: tokens/s of `LLM.embed` for short, mixed and long inputs. scripts/gpu_check runs it.

Without --model it makes a folder of the size of all-MiniLM-L6-v2 with random weights: the speed of a model does not
depend on what it has learned, and nothing needs to be fetched. Inputs are token ids, so that the model alone is timed.

    python scripts/throughput.py --device cuda --seconds 3
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from nobiru import LLM

VOCAB_SIZE, HIDDEN, LAYERS, HEADS, INTERMEDIATE, MAX_LENGTH = 30522, 384, 6, 12, 1536, 256
SETS = {"short (16 tokens)": (16, 16), "mixed (8 to 256)": (8, 256), "long (256)": (256, 256)}


def make_model(folder: Path) -> Path:
    """A BERT as `save_pretrained` writes it, with random weights."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "embeddings.word_embeddings.weight": (VOCAB_SIZE, HIDDEN),
        "embeddings.position_embeddings.weight": (512, HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, HIDDEN),
        "embeddings.LayerNorm.weight": (HIDDEN,),
        "embeddings.LayerNorm.bias": (HIDDEN,),
    }
    for layer in range(LAYERS):
        for name, size, inner in (
            ("attention.self.query", HIDDEN, HIDDEN),
            ("attention.self.key", HIDDEN, HIDDEN),
            ("attention.self.value", HIDDEN, HIDDEN),
            ("attention.output.dense", HIDDEN, HIDDEN),
            ("intermediate.dense", INTERMEDIATE, HIDDEN),
            ("output.dense", HIDDEN, INTERMEDIATE),
        ):
            shapes[f"encoder.layer.{layer}.{name}.weight"] = (size, inner)
            shapes[f"encoder.layer.{layer}.{name}.bias"] = (size,)
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes[f"encoder.layer.{layer}.{name}.weight"] = (HIDDEN,)
            shapes[f"encoder.layer.{layer}.{name}.bias"] = (HIDDEN,)
    weights = {
        name: torch.ones(shape) if name.endswith("Norm.weight") else torch.randn(shape, generator=generator) * 0.02
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_config_and_tokenizer(folder)
    return folder


def write_config_and_tokenizer(folder: Path) -> None:
    config = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": INTERMEDIATE,
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": MAX_LENGTH, "do_lower_case": False})
    )
    tokenizer = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": MAX_LENGTH}))


def inputs(shortest: int, longest: int, count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(shortest, longest, size=count, endpoint=True)
    return [rng.integers(4, 4000, size=length).tolist() for length in lengths]


def measure(llm: LLM, shortest: int, longest: int, *, num_prompts: int, seconds: float) -> list[float]:
    """Tokens per second of several calls, for at least `seconds` together."""
    prompts = inputs(shortest, longest, num_prompts)
    num_tokens = sum(map(len, prompts))
    llm.embed(prompts, use_tqdm=False)
    rates: list[float] = []
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s or len(rates) < 2:
        started_s = time.perf_counter()
        llm.embed(prompts, use_tqdm=False)
        rates.append(num_tokens / (time.perf_counter() - started_s))
    return rates


@contextmanager
def model_folder(given: str | None) -> Iterator[str]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        yield str(make_model(Path(folder)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder (default: MiniLM's shape with random weights)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--dtypes", default="float32,bfloat16", help="separated by commas")
    parser.add_argument("--prompts", type=int, default=256, help="texts in one call")
    parser.add_argument("--seconds", type=float, default=3, help="for each row of the table")
    args = parser.parse_args()
    table = Table("dtype", "inputs", "tokens/s", "range", title=f"LLM.embed, device {args.device}")
    with model_folder(args.model) as folder:
        for dtype in args.dtypes.split(","):
            llm = LLM(folder, dtype=dtype, device=args.device)
            for name, (shortest, longest) in SETS.items():
                rates = measure(llm, shortest, longest, num_prompts=args.prompts, seconds=args.seconds)
                table.add_row(
                    dtype, name, f"{statistics.median(rates):,.0f}", f"{min(rates):,.0f} to {max(rates):,.0f}"
                )
    Console().print(table)


if __name__ == "__main__":
    main()
