"""Models spread over workers: the hidden states and logits of the whole model, from processes that hold shares."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from rank_processes import Member, run_ranks
from real_models import stories260k
from torch import Tensor

from nobiru.errors import ConfigError
from nobiru.folder.read import read_folder
from nobiru.kv.cache import CacheShape, allocate_cache
from nobiru.layers.sharding import Shard, TensorGroup
from nobiru.models.registry import CausalModel, load_causal
from nobiru.models.weights import FLOAT32, Precision
from nobiru.ops.paged_layout import PagedLayout
from nobiru.parallel.dispatch import AllToAllDispatcher, ExpertTables
from nobiru.parallel.placement import initial_placement, slot_capacity_for
from nobiru.parallel.tensor import WorkerGroup

CPU = torch.device("cpu")
LENGTHS = (1, 5, 17, 2)
BLOCK_SIZE = 4
TOLERANCE = 1e-4


def steps(model: CausalModel, vocab_size: int) -> list[tuple[Tensor, Tensor]]:
    """Hidden states and logits of a step with prompts, and of one with the next token of each."""
    shape = CacheShape(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_size=model.head_size,
        dtype=model.dtype,
        block_size=BLOCK_SIZE,
    )
    generator = np.random.default_rng(0)
    width = -(-(max(LENGTHS) + 1) // BLOCK_SIZE)
    cache = allocate_cache(shape, width * len(LENGTHS), CPU)
    blocks = [np.arange(width, dtype=np.int32) + width * number for number in range(len(LENGTHS))]
    results = []
    for starts, lengths in (([0] * len(LENGTHS), LENGTHS), (LENGTHS, [1] * len(LENGTHS))):
        layout = PagedLayout(np.array(starts), np.array(lengths), blocks, block_size=BLOCK_SIZE, device=CPU)
        token_ids_T = torch.from_numpy(generator.integers(0, vocab_size, sum(lengths)))
        with torch.inference_mode():
            hidden_TC = model.forward(token_ids_T, layout, cache)
            results.append((hidden_TC, model.logits(hidden_TC)))
    return results


def load(folder: Path, group: TensorGroup | None, rank: int, size: int, precision: Precision = FLOAT32) -> CausalModel:
    spec = read_folder(folder)

    def slots(num_layers: int, num_experts: int) -> np.ndarray:
        capacity = slot_capacity_for(num_experts=num_experts, num_redundant=0, min_ranks=size)
        placement = initial_placement(
            num_layers=num_layers, num_experts=num_experts, num_ranks=size, slot_capacity=capacity
        )
        return placement.slots[:, rank]

    is_moe = "num_experts_per_tok" in spec.config
    with torch.inference_mode():
        return load_causal(spec, precision, CPU, slots=slots if is_moe and group is not None else None, group=group)


def run_worker(member: Member, folder: Path, precision: Precision = FLOAT32) -> list[tuple[Tensor, Tensor]]:
    group = WorkerGroup(Shard(member.rank, member.size))
    group.join(member.group())
    model = load(folder, group, member.rank, member.size, precision)
    assert not model.is_reentrant
    if (moe := model.moe) is not None:
        placement = initial_placement(
            num_layers=moe.num_layers,
            num_experts=moe.num_experts,
            num_ranks=member.size,
            slot_capacity=moe.slot_capacity,
        )
        moe.dispatcher = AllToAllDispatcher(group.group, ExpertTables(placement))
    return steps(model, read_folder(folder).vocab_size)


def check(folder: Path, size: int) -> None:
    whole = load(folder, None, 0, 1)
    expected = steps(whole, read_folder(folder).vocab_size)
    workers = run_ranks(run_worker, size, folder)
    for step, (hidden_TC, logits_TV) in enumerate(expected):
        for found in workers:
            torch.testing.assert_close(found[step][0], hidden_TC, atol=TOLERANCE, rtol=TOLERANCE)
            assert torch.equal(found[step][0], workers[0][step][0]), "workers do not drift apart"
        torch.testing.assert_close(workers[0][step][1], logits_TV, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "llama-biases", "llama-sharded", "mistral", "qwen2", "qwen3", "qwen3-bias"),
        *(
            "mixtral",
            "mixtral-bin",
            "qwen3-moe",
            "qwen3-moe-fused",
            "qwen3-moe-sparse",
            "olmoe",
            "olmoe-clipped",
            "qwen2-moe",
            "deepseek-v2",
            "deepseek-v3",
        ),
    ],
)
def test_small_models(tmp_path: Path, name: str, size: int) -> None:
    from small_models import make

    check(make(name, tmp_path), size)


@pytest.mark.parametrize("name", ["stories260K", "stories260K-moe8x-noisy", "stories260K-qwen3moe8x-noisy"])
def test_trained_models(name: str) -> None:
    check(stories260k().parent / name, 2)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_shares_of_odd_sizes_in_bfloat16(tmp_path: Path, compute: torch.dtype) -> None:
    """Three workers: 2 of 6 heads each, 2 or 1 of 4 experts, 34 or 33 of 101 tokens; no size is a multiple of 8."""
    config = transformers.MixtralConfig(
        vocab_size=101,
        hidden_size=84,
        intermediate_size=50,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path)
    precision = Precision(weights=torch.bfloat16, compute=compute)
    expected = steps(load(tmp_path, None, 0, 1, precision), config.vocab_size)
    tolerance = TOLERANCE if compute == torch.float32 else 0.03
    for found in run_ranks(run_worker, 3, tmp_path, precision):
        for (hidden_TC, _), (expected_TC, _) in zip(found, expected, strict=True):
            difference_TC = (hidden_TC - expected_TC).float().abs()
            assert float(difference_TC.mean()) <= tolerance * float(expected_TC.float().abs().mean())


def test_what_cannot_be_spread(tmp_path: Path) -> None:
    from small_models import make

    group = WorkerGroup(Shard(0, 3))
    with pytest.raises(ConfigError, match="must divide the model's 4 attention heads"):
        load(make("llama", tmp_path), group, 0, 3)
    with pytest.raises(ConfigError, match="cannot be spread over workers; llama"):
        load(make("gemma", tmp_path), group, 0, 3)
