"""Small random models in the layouts that real folders have, for tests.

Owns a table of recipes: one of the small architectures, for embedding models the modules of Sentence Transformers
behind it, and what is changed in its folder. Knows nothing of nobiru.

    python -m tests.small_models DEST [NAME ...]
"""

from __future__ import annotations

import argparse
import json
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, LayerNorm, Normalize, Pooling, Transformer

from tests.small_architectures import (
    ALBERT,
    BERT,
    BERT_MLM,
    BERT_RELU,
    CAMEMBERT,
    DEBERTA,
    DISTILBERT,
    ELECTRA,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GEMMA_EMBEDDING,
    GPT2,
    GPT_NEOX,
    GRANITE,
    HIDDEN_SIZE,
    LLAMA,
    LLAMA_BIASES,
    MAX_LENGTH,
    MISTRAL,
    MODERNBERT,
    MPNET,
    NOMIC_BERT,
    OPT,
    PHI3,
    POOLING_MODES,
    QWEN2,
    QWEN3,
    QWEN3_BIAS,
    QWEN3_EMBEDDING,
    ROBERTA,
    ROPES,
    XLM_ROBERTA,
    Encoder,
    randomize,
)
from tests.small_architectures import SENTENCES as SENTENCES
from tests.small_architectures import byte_bpe as byte_bpe
from tests.small_moe import MIXTRAL, MOE_ARCHITECTURES, QWEN3_MOE

Modules = Callable[[], list[torch.nn.Module]]


def _pooling(*modes: str, **options: Any) -> torch.nn.Module:
    pooling: torch.nn.Module = Pooling(HIDDEN_SIZE, pooling_mode=modes, **options)
    return pooling


def _random(module: torch.nn.Module) -> torch.nn.Module:
    randomize(module)
    return module


def _mean_normalize() -> list[torch.nn.Module]:
    return [_pooling("mean"), Normalize()]


def _dense_tanh() -> list[torch.nn.Module]:
    return [_pooling("mean"), _random(Dense(HIDDEN_SIZE, 48)), Normalize()]


def _dense_identity_residual() -> list[torch.nn.Module]:
    dense = Dense(HIDDEN_SIZE, HIDDEN_SIZE, bias=False, activation_function=torch.nn.Identity(), use_residual=True)
    return [_pooling("cls"), _random(dense)]


def _dense_chain() -> list[torch.nn.Module]:
    wide = Dense(2 * HIDDEN_SIZE, 96, activation_function=torch.nn.GELU(), use_residual=True)
    narrow = Dense(96, 40, activation_function=torch.nn.Identity())
    return [_pooling("cls", "mean"), _random(wide), _random(narrow), Normalize()]


def _layer_norm() -> list[torch.nn.Module]:
    return [_pooling("mean"), _random(LayerNorm(HIDDEN_SIZE)), Normalize()]


def _last_token() -> list[torch.nn.Module]:
    return [_pooling("lasttoken"), Normalize()]


def _pool_only(*modes: str, **options: Any) -> Modules:
    return lambda: [_pooling(*modes, **options)]


@dataclass(frozen=True)
class Recipe:
    """One folder: encoder, modules behind it, options of the Sentence Transformers model, and a last change on disk."""

    encoder: Encoder = BERT
    modules: Modules = _mean_normalize
    options: dict[str, Any] = field(default_factory=dict)
    max_seq_length: int = MAX_LENGTH
    finish: Callable[[Path], None] | None = None
    plain: bool = False


def _shard(folder: Path) -> None:
    """Split the weights into three files with an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for part in range(3):
        file_name = f"model-{part + 1:05}-of-00003.safetensors"
        chosen = names[part::3]
        save_file({name: tensors[name] for name in chosen}, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(chosen, file_name)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _fuse_experts(folder: Path) -> None:
    """All experts of a layer in one tensor, as transformers 5 has them in memory, in several files."""
    tensors = load_file(folder / "model.safetensors")
    experts: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name in [name for name in tensors if ".experts." in name]:
        layer, _, rest = name.partition(".experts.")
        number, part, _ = rest.split(".")
        experts.setdefault(layer, {}).setdefault(int(number), {})[part] = tensors.pop(name)
    for layer, parts in experts.items():
        ordered = [parts[number] for number in sorted(parts)]
        gate, up, down = ("w1", "w3", "w2") if "w1" in ordered[0] else ("gate_proj", "up_proj", "down_proj")
        layer = layer.replace("block_sparse_moe", "mlp")
        gate_up = [torch.cat((part[gate], part[up])) for part in ordered]
        tensors[f"{layer}.experts.gate_up_proj"] = torch.stack(gate_up)
        tensors[f"{layer}.experts.down_proj"] = torch.stack([part[down] for part in ordered])
    renamed = {name.replace("block_sparse_moe", "mlp"): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    _shard(folder)


def _to_transformers_4(folder: Path) -> None:
    """A decoder's folder as transformers 4 wrote it: `rope_scaling` beside `rope_theta`, and buffers of frequencies."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type" if name == "rope_type" else name: value for name, value in rope.items()}
    path.write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(folder / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _to_bin(folder: Path) -> None:
    """`pytorch_model.bin` instead of safetensors, in every module."""
    for path in sorted(folder.rglob("model.safetensors")):
        torch.save(load_file(path), path.with_name("pytorch_model.bin"))
        path.unlink()


def _to_sharded_bin(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for part in range(2):
        file_name = f"pytorch_model-{part + 1:05}-of-00002.bin"
        chosen = sorted(tensors)[part::2]
        torch.save({name: tensors[name] for name in chosen}, folder / file_name)
        weight_map |= dict.fromkeys(chosen, file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="utf-8")


def _to_gamma_beta(folder: Path) -> None:
    """LayerNorm weights under the names that TensorFlow checkpoints had, with the `bert.` prefix."""
    old_names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for new, old in old_names.items():
            name = name.replace(new, old)
        tensors["bert." + name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _to_legacy(folder: Path) -> None:
    """The spelling that Sentence Transformers 2 wrote: class names, pooling flags, `word_embedding_dimension`."""
    path = folder / "modules.json"
    modules = json.loads(path.read_text(encoding="utf-8"))
    for module in modules:
        class_name = module["type"].rpartition(".")[2]
        module["type"] = f"sentence_transformers.models.{class_name}"
        if class_name == "Pooling":
            config_path = folder / module["path"] / "config.json"
            mode = json.loads(config_path.read_text(encoding="utf-8"))["pooling_mode"]
            flags = {
                f"pooling_mode_{known}": known.removesuffix("_tokens").removesuffix("_token") == mode
                for known in ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
            }
            config = {"word_embedding_dimension": HIDDEN_SIZE, **flags}
            config_path.write_text(json.dumps(config), encoding="utf-8")
    path.write_text(json.dumps(modules), encoding="utf-8")


PROMPTS = {
    "prompts": {"query": "the query: ", "document": "a longer prompt for the document: "},
    "default_prompt_name": "document",
}

EMBEDDERS: dict[str, Recipe] = {
    "bert-mean-normalize": Recipe(),
    **{f"bert-{mode.replace('_', '-')}": Recipe(modules=_pool_only(mode)) for mode in POOLING_MODES},
    "bert-cls-max-mean": Recipe(modules=_pool_only("cls", "max", "mean")),
    "bert-all-modes": Recipe(modules=_pool_only(*POOLING_MODES)),
    "bert-relu-one-head": Recipe(encoder=BERT_RELU),
    "bert-dense-tanh": Recipe(modules=_dense_tanh),
    "bert-dense-identity-residual": Recipe(modules=_dense_identity_residual),
    "bert-dense-chain": Recipe(modules=_dense_chain),
    "bert-layernorm": Recipe(modules=_layer_norm),
    "bert-prompts": Recipe(modules=lambda: [_pooling("mean", include_prompt=False), Normalize()], options=PROMPTS),
    "bert-prompts-all-modes": Recipe(modules=_pool_only(*POOLING_MODES, include_prompt=False), options=PROMPTS),
    "bert-short-limit": Recipe(max_seq_length=16),
    "bert-sharded": Recipe(finish=_shard),
    "bert-bin": Recipe(modules=_dense_tanh, finish=_to_bin),
    "bert-sharded-bin": Recipe(finish=_to_sharded_bin),
    "bert-gamma-beta": Recipe(finish=_to_gamma_beta),
    "bert-legacy-modules": Recipe(finish=_to_legacy),
    "bert-plain": Recipe(plain=True),
    "bert-mlm-heads": Recipe(encoder=BERT_MLM, plain=True),
    "roberta": Recipe(encoder=ROBERTA),
    "xlm-roberta": Recipe(encoder=XLM_ROBERTA),
    "camembert": Recipe(encoder=CAMEMBERT, modules=_pool_only("mean")),
    "distilbert": Recipe(encoder=DISTILBERT),
    "mpnet": Recipe(encoder=MPNET),
    "modernbert": Recipe(encoder=MODERNBERT, modules=lambda: [_pooling("cls"), Normalize()]),
    "nomic-bert": Recipe(encoder=NOMIC_BERT),
    "electra": Recipe(encoder=ELECTRA),
    "albert": Recipe(encoder=ALBERT),
    "deberta-v2": Recipe(encoder=DEBERTA),
}

LANGUAGE_MODELS: dict[str, Recipe] = {
    "llama": Recipe(encoder=LLAMA, plain=True),
    "llama-biases": Recipe(encoder=LLAMA_BIASES, plain=True),
    **{f"llama-{name}": Recipe(encoder=encoder, plain=True) for name, encoder in ROPES.items()},
    "llama-sharded": Recipe(encoder=LLAMA_BIASES, plain=True, finish=_shard),
    "llama-transformers-4": Recipe(encoder=ROPES["yarn"], plain=True, finish=_to_transformers_4),
    "mistral": Recipe(encoder=MISTRAL, plain=True),
    "qwen2": Recipe(encoder=QWEN2, plain=True),
    "qwen3": Recipe(encoder=QWEN3, plain=True),
    "qwen3-bias": Recipe(encoder=QWEN3_BIAS, plain=True),
    **{name: Recipe(encoder=encoder, plain=True) for name, encoder in MOE_ARCHITECTURES.items()},
    "mixtral-fused": Recipe(encoder=MIXTRAL, plain=True, finish=_fuse_experts),
    "mixtral-bin": Recipe(encoder=MIXTRAL, plain=True, finish=_to_sharded_bin),
    "qwen3-moe-fused": Recipe(encoder=QWEN3_MOE, plain=True, finish=_fuse_experts),
    "gemma": Recipe(encoder=GEMMA, plain=True),
    "gemma2": Recipe(encoder=GEMMA2, plain=True),
    "gemma3": Recipe(encoder=GEMMA3, plain=True),
    "phi3": Recipe(encoder=PHI3, plain=True),
    "granite": Recipe(encoder=GRANITE, plain=True),
    "gpt2": Recipe(encoder=GPT2, plain=True),
    "gpt-neox": Recipe(encoder=GPT_NEOX, plain=True),
    "opt": Recipe(encoder=OPT, plain=True),
}

INSTRUCTION = {"prompts": {"query": "Instruct: find what answers it\nQuery:", "document": ""}}

CAUSAL_EMBEDDERS: dict[str, Recipe] = {
    "qwen3-embedding": Recipe(encoder=QWEN3_EMBEDDING, modules=_last_token, options=INSTRUCTION),
    "gemma-embedding": Recipe(encoder=GEMMA_EMBEDDING, modules=_last_token),
}

RECIPES = EMBEDDERS | LANGUAGE_MODELS | CAUSAL_EMBEDDERS
NAMES: tuple[str, ...] = tuple(EMBEDDERS)


@contextmanager
def _seeded(name: str) -> Iterator[None]:
    """The same weights for the same name, without touching the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(name.encode()))
        yield


def make(name: str, dest: Path) -> Path:
    """Write the model `name` into the folder `dest / name` (replaced if there) and return that folder."""
    recipe = RECIPES[name]
    folder, scratch = dest / name, dest / f"{name}.tmp"
    for path in (folder, scratch):
        shutil.rmtree(path, ignore_errors=True)
    with _seeded(name):
        model, tokenizer = recipe.encoder.build()
        target = folder if recipe.plain else scratch
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        if not recipe.plain:
            first = Transformer(str(scratch), max_seq_length=recipe.max_seq_length)
            SentenceTransformer(modules=[first, *recipe.modules()], device="cpu", **recipe.options).save(
                str(folder), create_model_card=False
            )
            shutil.rmtree(scratch)
    if recipe.finish is not None:
        recipe.finish(folder)
    return folder


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.small_models", description=__doc__.split("\n")[0])
    parser.add_argument("dest", type=Path, help="folder to write the models into")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(RECIPES)} (default: all)")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(RECIPES)):
        parser.error(f"unknown model {', '.join(unknown)}; choose from {', '.join(RECIPES)}")
    options.dest.mkdir(parents=True, exist_ok=True)
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    for name in options.names or RECIPES:
        print(make(name, options.dest))


if __name__ == "__main__":
    main()
